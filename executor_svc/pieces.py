"""A step with prompt logprobs is run as several forwards, so that the logits of a long prompt never exist at once.

::

    row 0  decode                     x                            piece 0: rows 0 and 1, row 2 up to its 64th
    row 1  prefill                    x x x x x                             scored position
    row 2  prefill, scored            x x x x x x x x x x x x      piece 1: row 2 from there on, row 3
    row 3  prefill, scored            x x x x

Every piece reaches the head with at most ``MAX_SCORED`` positions that are scored, besides one for each row that
samples. A row runs in the order of its tokens, so its later pieces find the keys and values of its earlier ones; on a
batch invariant backend the bits are those of one forward. Steps without scored rows are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from executor_svc.metadata import ScoredRow, StepMetadata

MAX_SCORED = 64  # positions: 64 rows of float32 logits are 13 MB at a vocabulary of 50,000


@dataclass(slots=True, frozen=True)
class ScoredPart:
    """Consecutive prompt tokens of one row that one piece scores."""

    scored: ScoredRow
    first: int  # position of the first of these tokens
    count: int


@dataclass(slots=True, frozen=True)
class Piece:
    """One forward of a step. Its rows of logits: first those that sample, then those of ``parts``, in order."""

    metadata: StepMetadata
    sampling: np.ndarray  # [S'] int64: which of the step's sampling rows its first logits belong to
    parts: tuple[ScoredPart, ...]


@dataclass(slots=True)
class _Cut:
    """Tokens [start, stop) of one row, by position in its sequence, and what they score."""

    row: int
    start: int
    stop: int
    part: ScoredPart | None = None


def split(metadata: StepMetadata, most: int = MAX_SCORED) -> list[Piece]:
    """The forwards of a step that has scored rows, in order. All tokens of the step run exactly once."""
    scored = {entry.row: entry for entry in metadata.scored_rows}
    ends = metadata.seq_lens + metadata.query_lens
    groups: list[list[_Cut]] = [
        [
            _Cut(row, int(metadata.seq_lens[row]), int(ends[row]))
            for row in range(metadata.num_rows)
            if row not in scored
        ]
    ]
    room = most
    for row, entry in scored.items():
        at, end = int(metadata.seq_lens[row]), int(ends[row])
        first = entry.first
        while at < end:
            if room == 0:
                groups.append([])
                room = most
            count = min(room, entry.stop - first)
            # The logits at position p score token p + 1. What is left behind the last of them belongs to its piece.
            stop = end if first + count == entry.stop else first + count - 1
            groups[-1].append(_Cut(row, at, stop, ScoredPart(entry, first, count)))
            at, first, room = stop, first + count, room - count
    return [_piece(metadata, cuts) for cuts in groups if cuts]


def _piece(metadata: StepMetadata, cuts: list[_Cut]) -> Piece:
    cuts = sorted(cuts, key=lambda cut: cut.row)
    rows = np.array([cut.row for cut in cuts], dtype=np.int32)
    starts = np.array([cut.start for cut in cuts], dtype=np.int32)
    query_lens = np.array([cut.stop - cut.start for cut in cuts], dtype=np.int32)
    query_starts = np.zeros(len(cuts) + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_starts[1:])
    # Index of each token in the whole step's arrays.
    offsets = metadata.query_starts[rows] + starts - metadata.seq_lens[rows] - query_starts[:-1]
    tokens = np.arange(query_starts[-1], dtype=np.int64) + np.repeat(offsets, query_lens)

    ends_here = starts + query_lens == metadata.seq_lens[rows] + metadata.query_lens[rows]
    samples = np.flatnonzero(ends_here & np.isin(rows, metadata.logit_rows)).astype(np.int32)
    indices = [query_starts[1:].take(samples).astype(np.int64) - 1]
    logit_rows = [samples]
    parts = []
    for i, cut in enumerate(cuts):
        if cut.part is not None:
            first = int(query_starts[i]) + cut.part.first - 1 - cut.start
            indices.append(np.arange(first, first + cut.part.count, dtype=np.int64))
            logit_rows.append(np.full(cut.part.count, i, dtype=np.int32))
            parts.append(cut.part)
    width = int((metadata.block_tables[rows] >= 0).sum(axis=1).max())
    piece = StepMetadata(
        input_ids=metadata.input_ids[tokens],
        positions=metadata.positions[tokens],
        slots=metadata.slots[rows],
        seq_lens=starts,
        query_lens=query_lens,
        query_starts=query_starts,
        block_tables=metadata.block_tables[rows, :width],
        kv_slots=metadata.kv_slots[tokens],
        logit_indices=np.concatenate(indices),
        logit_rows=np.concatenate(logit_rows),
        num_decode_rows=int(np.count_nonzero(rows < metadata.num_decode_rows)),
        key=metadata.key,
    )
    return Piece(piece, np.searchsorted(metadata.logit_rows, rows[samples]), tuple(parts))
