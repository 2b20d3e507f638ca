"""The digest by which core and executor check, on every step, that they hold the same view of the batch.

It covers the mirror **after** applying a plan's delta, from what both sides know without any result: for each touched
slot its generation, block count and last block. Each side computes it from *its own* table; only the order in which
slots are visited comes from the plan. It is chained, so a lost, repeated or reordered plan changes every later one.

It finds faults, not forgers (the link is authenticated), so it is a multilinear hash: each 32-bit word times an odd
64-bit constant of its position, summed modulo 2**64. One changed word always changes the sum; changes of several words
go unnoticed with a chance of at most 2**-32, for small numbers about 2**-60. A cryptographic hash of the same words
would take a third of the time of a whole step of 1,024 rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protos.wire import Epoch, Int32

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64's finaliser


def epoch_digest(epoch: Epoch) -> int:
    """The digest before the first plan of an epoch."""
    return _mixed(_mixed(epoch.incarnation) + epoch.counter)


def plan_digest(
    previous: int,
    seq: int,
    released: Int32,
    touched: Int32,
    generation: Int32,
    num_blocks: Int32,
    last_block: Int32,
) -> int:
    """Digest of plan ``seq``.

    ``released`` are the released slots in plan order. ``touched`` is the concatenation, in plan order, of: admitted
    slots, the slots of ``appended`` (repeats kept), decode slots, prefill slots. ``generation``, ``num_blocks`` and
    ``last_block`` are the caller's whole per-slot tables after the delta; they have all those slots, which the caller
    saw to (``last_block`` is -1 for a slot without blocks; a released slot that was not admitted again counts as 0
    blocks, last block -1).
    """
    slots = (np.concatenate([released, touched]) if len(released) else touched).astype(np.intp)
    count = len(slots)
    words = np.empty((4, count), dtype=np.int32)
    words[0] = slots
    for row, column in enumerate((generation, num_blocks, last_block), start=1):
        column.take(slots, out=words[row], mode="clip")  # the mode that takes straight into `out`
    total = int(np.dot(words.reshape(-1).astype(np.uint64), _constants(4 * count)))  # -1 becomes 2**64 - 1
    return _mixed(_mixed(_mixed(previous + total) + seq) + (len(released) << 32) + count)


def _mixed(value: int) -> int:
    """SplitMix64: a bijection of 64-bit numbers in which every bit of ``value`` moves every bit of the result."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK
    return value ^ (value >> 31)


def _constants(count: int) -> npt.NDArray[np.uint64]:
    """The odd constants of the first ``count`` positions."""
    global _table
    if count > len(_table):
        _table = _make_constants(1 << (count - 1).bit_length())
    return _table[:count]


def _make_constants(count: int) -> npt.NDArray[np.uint64]:
    value = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)  # numpy wraps modulo 2**64
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_MIX[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_MIX[1])
    return (value ^ (value >> np.uint64(31))) | np.uint64(1)


_table = _make_constants(4096)
