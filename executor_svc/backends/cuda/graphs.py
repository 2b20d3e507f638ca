"""Decode steps as captured CUDA graphs: one launch for the whole forward, for batches padded to a few sizes.

What changes from step to step (ids, positions, cache slots, block tables, the plan of attention) is in the step's
staging buffer, whose addresses depend on the padded size alone. The grid of attention is the largest that any plan of
that size needs; items beyond the plan are -1 and end at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from executor_svc.metadata import StepMetadata

if TYPE_CHECKING:
    from executor_svc.backends.cuda.decoder import CudaDecoder

MAX_GRAPH_ROWS = 256  # beyond, a step is long enough that launches hide behind it


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, then multiples of 32, up to ``max_rows`` or a little beyond: at most twice the work while weights
    dominate a step, and little waste where rows do."""
    most = min(max(max_rows, 1), MAX_GRAPH_ROWS)
    sizes = [size for size in (1, 2, 4, 8, 16, *range(32, MAX_GRAPH_ROWS + 1, 32)) if size < most]
    return [*sizes, most]


class DecodeGraphs:
    """Of one model with its cache; ``last_tokens`` is the buffer that sampling writes."""

    def __init__(self, model: CudaDecoder, last_tokens: torch.Tensor, max_rows: int) -> None:
        self._model = model
        self._last_tokens = last_tokens
        self._sizes = graph_sizes(max_rows)
        vocab = model.config.vocab_size
        self._logits = torch.empty(self._sizes[-1], vocab, dtype=torch.float32, device=last_tokens.device)
        self._inputs_at = 0
        self._replays: dict[int, Callable[[], None]] = {}

    def size_for(self, metadata: StepMetadata) -> int:
        """The padded size of a step that a captured graph runs; 0: it has prompt tokens, drafts or too many rows."""
        rows = metadata.num_rows
        if not rows == metadata.num_decode_rows == metadata.num_tokens == len(metadata.logit_indices):
            return 0
        if not 0 < rows <= self._sizes[-1]:
            return 0
        return self._sizes[bisect_left(self._sizes, rows)]

    def replay(self, size: int) -> torch.Tensor:
        """Of the step that was begun. -> logits float32 [size, vocab], overwritten by the next replay. RuntimeError
        where the step's inputs are no longer where they were at capture: the graphs would read old ones."""
        if self._model.ops.inputs_at != self._inputs_at:
            raise RuntimeError("a step was larger than what was reserved for it before graphs were captured")
        self._replays[size]()
        return self._logits[:size]

    def capture(self) -> int:
        """The largest first: the smaller ones fit into its memory. They run one after another, and what a replay leaves
        is read before the next."""
        pool = self._model.device.graph_pool()
        for size in reversed(self._sizes):
            self._model.ops.begin_step(_no_rows(), size)

            def forward(size: int = size) -> None:
                ids = self._model.ops.gather_ids(self._last_tokens)
                self._logits[:size].copy_(self._model.compute(ids, self._model.ops.step.wanted))

            forward()  # kernels and workspaces are loaded before the capture
            self._replays[size] = self._model.device.capture(forward, pool)
        self._inputs_at = self._model.ops.inputs_at
        return len(self._replays)


def _no_rows() -> StepMetadata:
    """A step of which only padding is left: nothing is read from or written to the cache."""
    none32, none64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return StepMetadata(
        input_ids=none64,
        positions=none64,
        slots=none32,
        seq_lens=none32,
        query_lens=none32,
        query_starts=np.zeros(1, np.int32),
        block_tables=np.zeros((0, 0), np.int32),
        kv_slots=none64,
        logit_indices=none64,
        logit_rows=none32,
        num_decode_rows=0,
    )
