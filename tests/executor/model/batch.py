"""Step metadata for tests: sequences over a paged cache, fed in any chunks and mixtures."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from executor_svc.metadata import StepMetadata
from executor_svc.models.base import Model


@dataclass
class Sequence:
    """``blocks`` are its pages; ``length`` tokens of ``ids`` are in the cache."""

    ids: list[int]
    blocks: list[int]
    length: int = 0
    slot: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def metadata_for(rows: list[tuple[Sequence, int]], block_size: int, every_logit: bool = True) -> StepMetadata:
    """Rows of (sequence, number of new tokens). Logits of every new token, or of each row's last one."""
    decode = sum(1 for _, n in rows if n == 1)
    query_lens = np.array([n for _, n in rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    positions = np.concatenate([np.arange(s.length, s.length + n) for s, n in rows]).astype(np.int64)
    width = max(len(s.blocks) for s, _ in rows)
    tables = np.full((len(rows), width), -1, np.int32)
    for i, (s, _) in enumerate(rows):
        tables[i, : len(s.blocks)] = s.blocks
    row_of = np.repeat(np.arange(len(rows)), query_lens)
    blocks = tables[row_of, positions // block_size].astype(np.int64)
    indices = np.arange(starts[-1]) if every_logit else starts[1:] - 1
    return StepMetadata(
        input_ids=np.concatenate([s.ids[s.length : s.length + n] for s, n in rows]).astype(np.int64),
        positions=positions,
        slots=np.array([s.slot for s, _ in rows], np.int32),
        seq_lens=np.array([s.length for s, _ in rows], np.int32),
        query_lens=query_lens,
        query_starts=starts,
        block_tables=tables,
        kv_slots=blocks * block_size + positions % block_size,
        logit_indices=indices.astype(np.int64),
        logit_rows=row_of[indices].astype(np.int32),
        num_decode_rows=decode,
    )


def run(model: Model, rows: list[tuple[Sequence, int]], block_size: int, every_logit: bool = True) -> torch.Tensor:
    """One step; advances the sequences and files each row's logits under its sequence. -> [S, vocab]"""
    metadata = metadata_for(rows, block_size, every_logit)
    logits = model.forward(torch.from_numpy(metadata.input_ids), metadata)
    for i, (sequence, n) in enumerate(rows):
        sequence.logits.append(logits[torch.from_numpy(metadata.logit_rows == i)].clone())
        sequence.length += n
    return logits
