"""The most KV blocks that a set of running sequences can come to hold at once.

Each decodes one token a step until its limit, then gives all its blocks back. What they hold together only grows
between two ends, so the peak lies just before one of them::

    blocks
      |          ,| peak
      |      ,--' |   ,|
      |   ,-'     '--' |
      +-----------|----|---> steps
                first  second end

The answer is exact while rows run in step and share no blocks. Shared ones make it smaller, rows that stand still
may make it larger: preemption stands behind it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def peak_blocks(tokens: Ints, limits: Ints, block_size: int) -> int:
    """``tokens`` [R]: tokens that have KV after the next row of each sequence; ``limits`` [R]: the most that will have
    (at least ``tokens``). O(R log R + R * block_size)."""
    if not len(tokens):
        return 0
    left = limits - tokens
    order = np.argsort(-left, kind="stable")  # the last to end comes first: sequence k ends with 0..k still there
    left = left[order]
    # ceil((n + t) / size) = whole + t // size + (1 if part + t % size >= size), with n + size - 1 = whole * size + part
    whole, part = np.divmod(tokens[order] + block_size - 1, block_size)
    steps, rest = np.divmod(left, block_size)
    counts = np.zeros((len(left), block_size + 1), dtype=np.int64)  # [k, p]: of 0..k, those with part >= p
    counts[np.arange(len(left)), part] = 1
    counts = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1].cumsum(axis=0)
    there = np.arange(1, len(left) + 1)
    # Of equals in `left`, the last one's row counts them all.
    held = np.cumsum(whole) + there * steps + counts[np.arange(len(left)), block_size - rest]
    return int(held.max())
