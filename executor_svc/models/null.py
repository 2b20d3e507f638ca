"""A model that costs nothing: for measuring the worker's round, and for testing it with tokens known in advance."""

from __future__ import annotations

import hashlib

import torch

from executor_svc.metadata import StepMetadata
from executor_svc.models.base import ModelFacts


class NullModel:
    """Implements ``Model``. The greedy token after input id ``i`` at position ``p`` is ``next_token(i, p)``.

    Its logits are one row of a precomputed one-hot table per sampled row, so a forward is one gather.
    """

    def __init__(self, vocab_size: int = 256, context_length: int = 1 << 20, name: str = "null", eos: int = 0) -> None:
        if not 0 <= eos < vocab_size or vocab_size < 3:
            raise ValueError(f"eos {eos}, vocab_size {vocab_size}")
        identity = hashlib.sha256(f"null {vocab_size} {eos}".encode()).hexdigest()
        self.facts = ModelFacts(
            name=name,
            architecture="null",
            vocab_size=vocab_size,
            context_length=context_length,
            num_layers=0,
            kv_bytes_per_token=1,
            eos_token_ids=(eos,),
            fingerprint=identity,
            numerics=identity,
        )
        self._eos = eos
        self._one_hot = torch.eye(vocab_size, dtype=torch.float32) * 16.0

    def next_token(self, token_id: int, position: int) -> int:
        """Never the end-of-sequence id, so that length decides when a sequence ends."""
        token = (token_id * 31 + position * 7 + 1) % (self.facts.vocab_size - 1)
        return token + (token >= self._eos)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size}")

    def forward(self, input_ids: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        """int64 [T] -> float32 [S, vocab_size]; a view of nothing that a later call changes."""
        indices = torch.from_numpy(metadata.logit_indices)
        positions = torch.from_numpy(metadata.positions)[indices]
        token = (input_ids[indices] * 31 + positions * 7 + 1) % (self.facts.vocab_size - 1)
        return self._one_hot[token + (token >= self._eos)]
