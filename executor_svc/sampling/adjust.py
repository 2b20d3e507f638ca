"""What changes rows' logits before the draw, in the contract's order, in float32 and in place.

One pass over all rows of a step that have rules. What each row touches is laid end to end: the ids of its bias, its
allowed ids, those that min_tokens masks, and its history (each id once). A row costs what it touches, and one more look
for the largest logit only where the one that was largest fell.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from executor_svc.compiled import kept_njit
from executor_svc.sampling.rules import RowRules

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_NO_IDS = np.empty(0, dtype=np.int32)
_UNKNOWN = -1


@kept_njit(nogil=True)
def _adjust(
    logits: Float32,
    rows: Int64,
    ids: npt.NDArray[np.int32],
    ends: Int64,
    bias: Float32,
    outputs: npt.NDArray[np.int32],
    penalties: Float32,
    tops: Float32,
    likeliest: Int64,
) -> None:
    """``ids``: row j's segments end at ``ends[j]`` [4]; ``bias`` and ``outputs`` go with the first and the last ones.

    ``tops`` and ``likeliest`` [n]: of each row before and, where it is still known, after; else likeliest is _UNKNOWN.
    """
    allowed = np.zeros(logits.shape[1], dtype=np.bool_)
    begin, biased, counted = 0, 0, 0
    for j in range(len(rows)):
        row = logits[rows[j]]
        bias_end, allowed_end, masked_end, history_end = ends[j]
        for k in range(begin, bias_end):
            row[ids[k]] += bias[biased]
            biased += 1
        if allowed_end > bias_end:
            for k in range(bias_end, allowed_end):
                allowed[ids[k]] = True
            for i in range(len(row)):
                row[i] = row[i] if allowed[i] else -np.inf
            allowed[:] = False
        for k in range(allowed_end, masked_end):
            row[ids[k]] = -np.inf
        size = history_end - masked_end
        if size:  # gathered first, so that the arithmetic is one vector loop
            repetition, frequency, presence = penalties[j]
            values = np.empty(size, dtype=np.float32)
            for k in range(size):
                values[k] = row[ids[masked_end + k]]
            counts = outputs[counted : counted + size]
            for k in range(size):
                x = values[k]
                x = x / repetition if x > 0 else x * repetition
                x -= frequency * np.float32(counts[k])
                values[k] = x - presence if counts[k] > 0 else x
            for k in range(size):
                row[ids[masked_end + k]] = values[k]
            counted += size

        best = likeliest[j]
        if allowed_end > bias_end or row[best] < tops[j]:
            best = _UNKNOWN
        else:  # untouched ids are no more than before: only those touched may have come to be the largest
            top = row[best]
            for k in range(begin, history_end):
                x = row[ids[k]]
                if x > top or (x == top and ids[k] < best) or np.isnan(x):
                    top, best = x, ids[k]
                    if np.isnan(x):
                        break
            tops[j] = top
        likeliest[j] = best
        begin = history_end


def adjust_rows(
    logits: Float32, rows: Int64, rules: Sequence[RowRules], positions: Int64, tops: Float32, tokens: Int64
) -> None:
    """Apply bias, allowed ids, the min_tokens mask and penalties to ``rows`` (n indices into logits [N, V]), in place.

    ``rules`` [n]. ``positions`` [N]: the number of outputs before the one to draw. ``tops`` [N] and ``tokens`` [N]: the
    largest logit of each row, finite, and its lowest id, before and after. Afterwards a top of -inf says that every id
    of the row is masked, NaN or +inf that what was added went out of bounds.
    """
    parts: list[npt.NDArray[np.int32]] = []
    outputs: list[npt.NDArray[np.int32]] = []
    for i, rule in zip(rows.tolist(), rules, strict=True):
        history = _NO_IDS
        if rule.counts is not None:
            history, counts = rule.counts.view()
            outputs.append(counts)
        masked = rule.masked if positions[i] < rule.min_tokens else _NO_IDS
        parts += (rule.bias_ids, rule.allowed, masked, history)
    ends = np.cumsum([len(part) for part in parts]).reshape(-1, 4)
    penalties = np.array([(r.repetition, r.frequency, r.presence) for r in rules], dtype=np.float32)
    bias = np.concatenate([rule.bias for rule in rules])
    found_tops, found = tops[rows], tokens[rows]
    _adjust(
        logits, rows, np.concatenate(parts), ends, bias, np.concatenate([_NO_IDS, *outputs]), penalties,
        found_tops, found,
    )  # fmt: skip
    for j in np.flatnonzero(found == _UNKNOWN).tolist():
        row = logits[rows[j]]
        found[j] = row.argmax()  # numpy: the first of equal values, and the first NaN if there is one
        found_tops[j] = row[found[j]]
    tops[rows], tokens[rows] = found_tops, found
