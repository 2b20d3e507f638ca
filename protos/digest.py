"""The digest by which core and executor check, on every step, that they hold the same view of the batch.

It covers the mirror **after** applying a plan's delta, from what both sides know without any result: for each touched
slot its generation, block count and last block. Each side computes it from *its own* table; only the order in which
slots are visited comes from the plan. It is chained, so a lost, repeated or reordered plan changes every later one.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from protos.wire import Epoch, Int32


def epoch_digest(epoch: Epoch) -> int:
    """The digest before the first plan of an epoch."""
    data = struct.pack("<QQ", epoch.incarnation, epoch.counter)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


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
    ``last_block`` are the caller's whole per-slot tables after the delta (``last_block`` is -1 for a slot without
    blocks; a released slot that was not admitted again counts as 0 blocks, last block -1).
    """
    rows = np.empty((4, len(released) + len(touched)), dtype="<i4")
    rows[0, : len(released)] = released
    rows[0, len(released) :] = touched
    slots = rows[0]
    np.take(generation, slots, out=rows[1])
    np.take(num_blocks, slots, out=rows[2])
    np.take(last_block, slots, out=rows[3])
    state = hashlib.blake2b(struct.pack("<QQI", previous, seq, len(released)), digest_size=8)
    state.update(rows.data)
    return int.from_bytes(state.digest(), "little")
