"""The model's forward in a bare loop: no services, no scheduler, argmax only. What serving is measured against."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.metadata import StepMetadata
from executor_svc.models.base import Model


@dataclass(slots=True, frozen=True)
class BareRun:
    seconds: float  # from the first forward to the last token
    prefill_seconds: float
    output_tokens: int
    tokens: list[list[int]]

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds


class BareLoop:
    """A fixed batch: prefill in steps of at most ``step_tokens`` new tokens, then decode all rows together.

    Blocks are laid out in order: row r owns blocks [r * blocks_per_row, (r + 1) * blocks_per_row).
    """

    def __init__(self, model: Model, rows: int, max_tokens: int, block_size: int, step_tokens: int) -> None:
        self._model, self._block_size, self._step_tokens = model, block_size, step_tokens
        per_row = -(-max_tokens // block_size)
        model.allocate_kv_cache(rows * per_row, block_size)
        self._blocks = np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)

    def run(self, prompts: list[list[int]], output_tokens: int) -> BareRun:
        begin = time.perf_counter()
        last = self._prefill(prompts)
        prefilled = time.perf_counter()
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        columns = [last]
        rows = np.arange(len(prompts))
        for _ in range(output_tokens - 1):
            last = self._step(last, rows, lengths, np.ones_like(lengths), len(rows), rows)
            columns.append(last)
            lengths = lengths + 1
        seconds = time.perf_counter() - begin
        tokens = np.stack(columns, axis=1)
        return BareRun(seconds, prefilled - begin, tokens.size, tokens.tolist())

    def _prefill(self, prompts: list[list[int]]) -> np.ndarray:
        """Whole prompts, as many as fit a step; a longer one in chunks. Returns the first output of each row."""
        done = np.zeros(len(prompts), dtype=np.int32)
        first = np.zeros(len(prompts), dtype=np.int64)
        while any(done[row] < len(prompt) for row, prompt in enumerate(prompts)):
            rows, counts, room = [], [], self._step_tokens
            for row, prompt in enumerate(prompts):
                count = min(len(prompt) - int(done[row]), room)
                if count > 0:
                    rows.append(row)
                    counts.append(count)
                    room -= count
            ids = np.concatenate(
                [np.array(prompts[r][done[r] : done[r] + c]) for r, c in zip(rows, counts, strict=True)]
            )
            complete = np.array([r for r, c in zip(rows, counts, strict=True) if done[r] + c == len(prompts[r])], int)
            sampled = self._step(ids, np.array(rows), done[rows], np.array(counts, dtype=np.int32), 0, complete)
            first[complete] = sampled
            done[rows] += np.array(counts, dtype=np.int32)
        return first

    def _step(
        self,
        input_ids: np.ndarray,
        rows: np.ndarray,
        seq_lens: np.ndarray,
        query_lens: np.ndarray,
        num_decode_rows: int,
        sampling: np.ndarray,
    ) -> np.ndarray:
        """One forward over the flat batch; the argmax ids of the rows in ``sampling``."""
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        of_token = np.repeat(np.arange(len(rows)), query_lens)
        positions = (np.arange(starts[-1]) - starts[of_token] + seq_lens[of_token]).astype(np.int64)
        used = int(np.max(seq_lens + query_lens) - 1) // self._block_size + 1
        tables = self._blocks[rows, :used].copy()
        tables[np.arange(used) * self._block_size >= (seq_lens + query_lens)[:, None]] = -1
        kv_slots = tables[of_token, positions // self._block_size].astype(np.int64) * self._block_size
        sampled = np.flatnonzero(np.isin(rows, sampling))
        metadata = StepMetadata(
            input_ids=input_ids.astype(np.int64),
            positions=positions,
            slots=rows.astype(np.int32),
            seq_lens=seq_lens.astype(np.int32),
            query_lens=query_lens.astype(np.int32),
            query_starts=starts,
            block_tables=tables,
            kv_slots=kv_slots + positions % self._block_size,
            logit_indices=(starts[sampled + 1] - 1).astype(np.int64),
            logit_rows=sampled.astype(np.int32),
            num_decode_rows=num_decode_rows,
        )
        with torch.inference_mode():
            logits = self._model.forward(torch.from_numpy(metadata.input_ids), metadata)
            return logits.argmax(-1).numpy()
