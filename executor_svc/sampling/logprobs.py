"""Raw log probabilities of one row: of the model itself, before any bias, mask, penalty or temperature.

``log_softmax(logits)`` in float64, whatever the request does to its draws afterwards. A rank is one more than the
number of ids that come before: by logit descending, ties by id. The top ids are the first of that order, so the token
itself is among them wherever its rank says so.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from executor_svc.compiled import kept_njit
from executor_svc.sampling.exp2 import EXP2, STEP, STEPS_PER_E, TABLE_BITS, TABLE_SIZE
from protos.step import RowLogprobs
from protos.wire import LE_FLOAT32, LE_INT32

_LOWEST_OCTAVE = 80  # 2**24 ids below 2**-80 of the largest add less than float64 resolves
_SCALE = np.array([2.0**-k for k in range(_LOWEST_OCTAVE + 2)])


@kept_njit(nogil=True)
def _sift_down(heap: npt.NDArray[np.int64], at: int, size: int) -> None:
    """Restore a heap, smallest first, whose element ``at`` may have grown."""
    value = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@kept_njit(nogil=True)
def _score(
    row: npt.NDArray[np.float32],
    bits: npt.NDArray[np.int32],
    chosen: int,
    exp2: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64],
    keys: npt.NDArray[np.int64],
) -> tuple[float, int]:
    """(log of the sum of exponentials, rank of ``chosen``); ``keys`` [k] is filled with the first k ids.

    ``bits`` is ``row`` as integers. A key is ``(logit as an ordered integer) << 32 | (2**31 - 1 - id)``: no two are
    equal, and the larger comes first.
    """
    top = row[0]
    for i in range(len(row)):
        top = max(top, row[i])
    wide = np.float64(top)
    value = row[chosen]
    lowest = -_LOWEST_OCTAVE * TABLE_SIZE
    total = 0.0
    rank = 1
    for i in range(len(row)):
        steps = (np.float64(row[i]) - wide) * STEPS_PER_E
        if steps > lowest:
            whole = math.floor(steps)
            n = int(whole)
            x = (steps - whole) * STEP
            p = 1.0 + x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0)))))
            total += exp2[n & (TABLE_SIZE - 1)] * p * scale[-(n >> TABLE_BITS)]
        rank += row[i] > value or (row[i] == value and i < chosen)

    size = len(keys)
    if size:
        border = np.float32(-np.inf)  # of the last kept: later ids with that logit come after it
        for i in range(len(row)):
            if i >= size and row[i] <= border:
                continue
            # Negative floats order backwards; -0.0 is made 0.0, which it equals.
            b = np.int64(bits[i]) if row[i] != 0.0 else np.int64(0)
            key = ((b if b >= 0 else np.int64(-(2**31)) - b) << 32) | (2**31 - 1 - i)
            if i < size:
                keys[i] = key
                if i == size - 1:
                    for at in range(size // 2 - 1, -1, -1):
                        _sift_down(keys, at, size)
            else:
                keys[0] = key
                _sift_down(keys, 0, size)
            if i >= size - 1:
                border = row[2**31 - 1 - (keys[0] & 0xFFFFFFFF)]
        keys.sort()
    return wide + math.log(total), rank


def row_logprobs(row: npt.NDArray[np.float32], chosen: int, top: int, position: int) -> RowLogprobs:
    """``row`` [V] raw logits, contiguous, without NaN or +inf and not all -inf; ``chosen`` an id; ``top`` how many of
    the likeliest ids to name (at most V are). ``position`` indexes the whole sequence."""
    keys = np.empty(min(max(top, 0), len(row)), dtype=np.int64)
    log_sum, rank = _score(row, row.view(np.int32), chosen, EXP2, _SCALE, keys)
    ids = (2**31 - 1 - (keys[::-1] & 0xFFFFFFFF)).astype(LE_INT32)
    return RowLogprobs(
        position=position,
        chosen=float(row[chosen]) - log_sum,
        rank=rank,
        top_ids=ids.tobytes(),
        top_values=(row[ids].astype(np.float64) - log_sum).astype(LE_FLOAT32).tobytes(),
    )
