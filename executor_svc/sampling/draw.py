"""The draw: exact, and a function of one row alone.

Each id gets an integer weight, ``round(exp((logit - max) / temperature) * 2**38)``. From there on everything is integer
arithmetic: no result depends on the order of a sum, on the batch, or on how wide the machine's vectors are. The
exponential is our own (a table of 2**(j/64) and a short polynomial, plain multiplications and additions in float64), so
that it has the same bits on every IEEE machine.

Candidates are ordered by weight descending, ties by id. In that order:

1. min_p keeps the weights of at least ``min_p`` times the largest;
2. top_k keeps the first k;
3. top_p keeps the shortest beginning that holds at least ``top_p`` of the mass kept so far;
4. the draw takes the first id at which the running sum exceeds ``bits * mass / 2**64``.

No row is ever sorted whole: ids are counted into 16 buckets an octave, and only a bucket in which a border falls is
sorted.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from executor_svc.compiled import kept_njit
from executor_svc.sampling.exp2 import EXP2, STEP, STEPS_PER_E, TABLE_BITS, TABLE_SIZE

WEIGHT_BITS = 38  # 2**24 ids of the largest weight still sum below 2**62
MAX_WEIGHT = 1 << WEIGHT_BITS
_BUCKET_SHIFT = TABLE_BITS - 4
_ID_BITS = 24
_ID_MASK = (1 << _ID_BITS) - 1

_OCTAVES = WEIGHT_BITS + 2  # below 2**-39 every weight rounds to 0
_LOWEST = -_OCTAVES * TABLE_SIZE
_NUM_BUCKETS = (-_LOWEST >> _BUCKET_SHIFT) + 1
_SCALE = np.array([2.0 ** (WEIGHT_BITS - k) for k in range(_OCTAVES + 2)])


@kept_njit(nogil=True, inline="always")
def _weight(steps: float, exp2: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> tuple[int, int]:
    """``steps`` <= 0, in 1/64 octaves -> (weight, floor of steps). Monotone: the polynomial only ever falls short."""
    whole = math.floor(steps)
    n = int(whole)
    x = (steps - whole) * STEP
    p = 1.0 + x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0))))
    return int(exp2[n & (TABLE_SIZE - 1)] * p * scale[-(n >> TABLE_BITS)] + 0.5), n


@kept_njit(nogil=True)
def _sorted_bucket(
    bucket: int, buckets: npt.NDArray[np.int16], weights: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The ids of one bucket as sort keys, ``(MAX_WEIGHT - weight) << 24 | id``, in candidate order."""
    size = 0
    for i in range(len(buckets)):
        size += buckets[i] == bucket
    keys = np.empty(size, dtype=np.int64)
    at = 0
    for i in range(len(buckets)):
        if buckets[i] == bucket:
            keys[at] = ((MAX_WEIGHT - weights[i]) << _ID_BITS) | i
            at += 1
    keys.sort()
    return keys


@kept_njit(nogil=True)
def _multiply_high(a: np.uint64, b: np.uint64) -> np.uint64:
    """Upper 64 bits of the 128-bit product."""
    low = np.uint64(0xFFFFFFFF)
    s = np.uint64(32)
    a0, a1 = a & low, a >> s
    b0, b1 = b & low, b >> s
    middle = a1 * b0 + ((a0 * b0) >> s)
    return a1 * b1 + (middle >> s) + ((a0 * b1 + (middle & low)) >> s)


@kept_njit(nogil=True)
def _draw_one(
    logits: npt.NDArray[np.float32],
    top: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    bits: np.uint64,
    exp2: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64],
    weights: npt.NDArray[np.int64],
    buckets: npt.NDArray[np.int16],
    counts: npt.NDArray[np.int64],
    masses: npt.NDArray[np.int64],
) -> int:
    counts[:] = 0
    masses[:] = 0
    factor = STEPS_PER_E / temperature
    least = max(1, math.ceil(min_p * MAX_WEIGHT))
    for i in range(len(logits)):
        steps = (np.float64(logits[i]) - top) * factor
        b = -1
        if steps > _LOWEST:
            w, n = _weight(steps, exp2, scale)
            if w >= least:
                b = -n >> _BUCKET_SHIFT
                weights[i] = w
                counts[b] += 1
                masses[b] += w
        buckets[i] = b

    # What is kept ends inside bucket `last`, with its first `inside` ids; `mass` is the sum of what is kept.
    last = _NUM_BUCKETS - 1
    inside = np.int64(1) << 40  # all
    mass = np.int64(0)
    if top_k > 0:
        seen = 0
        for b in range(_NUM_BUCKETS):
            if seen + counts[b] >= top_k:
                last, inside = b, np.int64(top_k - seen)
                keys = _sorted_bucket(b, buckets, weights)
                for at in range(inside):
                    mass += MAX_WEIGHT - (keys[at] >> _ID_BITS)
                break
            seen += counts[b]
            mass += masses[b]
    else:
        for b in range(_NUM_BUCKETS):
            mass += masses[b]

    if top_p < 1.0:
        wanted = min(max(np.int64(1), np.int64(math.ceil(top_p * np.float64(mass)))), mass)
        mass = np.int64(0)
        for b in range(last + 1):
            if mass + masses[b] >= wanted:  # true at the latest in bucket `last`, of which only a part may be kept
                keys = _sorted_bucket(b, buckets, weights)
                for at in range(len(keys)):
                    mass += MAX_WEIGHT - (keys[at] >> _ID_BITS)
                    if mass >= wanted:
                        break
                break
            mass += masses[b]

    target = np.int64(_multiply_high(bits, np.uint64(mass)))
    below = np.int64(0)
    for b in range(_NUM_BUCKETS):
        if below + masses[b] > target:
            keys = _sorted_bucket(b, buckets, weights)
            for at in range(len(keys)):
                below += MAX_WEIGHT - (keys[at] >> _ID_BITS)
                if below > target:
                    return keys[at] & _ID_MASK
        below += masses[b]
    return -1  # not reached: target < mass


@kept_njit(nogil=True)
def _draw_rows(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    tops: npt.NDArray[np.float32],
    temperature: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    bits: npt.NDArray[np.uint64],
    exp2: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64],
    out: npt.NDArray[np.int64],
) -> None:
    vocab_size = logits.shape[1]
    weights = np.empty(vocab_size, dtype=np.int64)
    buckets = np.empty(vocab_size, dtype=np.int16)
    counts = np.empty(_NUM_BUCKETS, dtype=np.int64)
    masses = np.empty(_NUM_BUCKETS, dtype=np.int64)
    for j in range(len(rows)):
        out[j] = _draw_one(
            logits[rows[j]],
            np.float64(tops[j]),
            temperature[j],
            top_k[j],
            top_p[j],
            min_p[j],
            bits[j],
            exp2,
            scale,
            weights,
            buckets,
            counts,
            masses,
        )


def draw_rows(
    logits: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    tops: npt.NDArray[np.float32],
    temperature: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
    bits: npt.NDArray[np.uint64],
) -> npt.NDArray[np.int64]:
    """One id for each of ``rows`` (n indices into logits [N, V], C order); all other arrays are [n].

    ``tops`` is each row's largest logit and must be finite; no logit is NaN or +inf. ``temperature`` > 0, ``top_k`` 0
    for off, 0 < ``top_p`` <= 1, 0 <= ``min_p`` <= 1; ``bits`` from ``philox.draw_bits``.
    """
    out = np.empty(len(rows), dtype=np.int64)
    _draw_rows(logits, rows, tops, temperature, top_k, top_p, min_p, bits, EXP2, _SCALE, out)
    return out
