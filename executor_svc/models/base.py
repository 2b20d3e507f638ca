"""What the worker round needs of a model: one forward over a flat batch, and the facts that size its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.metadata import StepMetadata


@dataclass(slots=True, frozen=True)
class ModelFacts:
    """Sizes and names of a loaded model. ``fingerprint`` covers architecture and weights; ``numerics`` adds dtype,
    backend and flags: only executors with equal ``numerics`` continue each other's requests by default."""

    name: str
    architecture: str
    vocab_size: int
    context_length: int  # tokens, prompt and output together
    num_layers: int
    kv_bytes_per_token: int  # bytes of K and V of one token over all layers
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # hex SHA-256
    numerics: str  # hex SHA-256


class Model(Protocol):
    """A causal language model with its own paged KV cache.

    ``allocate_kv_cache`` is called once. ``forward`` computes the new tokens' keys and values into the cache, attends
    over the pages that ``metadata.block_tables`` names, and returns the logits of ``metadata.logit_indices``.
    It never waits for the device, and never reads a page or a position that the metadata does not name.
    """

    facts: ModelFacts

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None: ...

    def forward(self, input_ids: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        """``input_ids`` int64 [T], complete (no -1), on the model's device -> float32 logits [S, vocab_size]."""
        ...
