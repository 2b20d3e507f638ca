"""The host's plan of a step's attention: which block of threads works on which queries and which KV positions.

Items are described in ``cuda/paged_kv.cuh``. Rows with few packed rows (query tokens x group <= 16) go to the decode
kernel, split over their KV positions so that all blocks have about the same work, however skewed the lengths are; the
others go to the prefill kernel, in query tiles over all their KV positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor_svc.kernels.table import MAX_GROUP

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

ITEM_FIELDS = 8
SPLIT_UNIT = 64  # tokens: splits begin at multiples of it, one tile of each of the four warps
MIN_SPLIT = 4 * SPLIT_UNIT  # tokens: a shorter range costs more in the merge than it gains
EVEN_SHARE = 1.25  # a range longer than this many even shares of the work is cut, whatever the number of rows


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """``decode`` and ``prefill`` items int32 [n, 8]; ``merges`` int32 [m, 4]; ``num_slots`` partial results."""

    decode: Int32
    prefill: Int32
    merges: Int32
    num_slots: int


def plan_attention(
    query_starts: Int32,
    query_lens: Int32,
    seq_lens: Int32,
    *,
    group: int,
    kv_heads: int,
    window: int,
    tile_rows: int,
    target_blocks: int,
) -> AttentionPlan:
    """``query_starts`` [R or more], ``query_lens`` [R], ``seq_lens`` [R] tokens cached before the step.

    ``window`` 0: none. ``tile_rows``: packed rows of a prefill block (0: everything goes to the decode kernel, in
    pieces of at most 16 packed rows). ``target_blocks``: decode blocks that fill the device.
    """
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{group} query heads a KV head; 1 to {MAX_GROUP} are supported")
    starts, lens, past = (array.astype(np.int64) for array in (query_starts[: len(query_lens)], query_lens, seq_lens))
    rows, none = np.arange(len(lens)), np.empty(0, np.int64)
    few = lens * group <= MAX_GROUP
    if tile_rows == 0 or few.all():
        chosen, others = rows, none
    else:
        chosen, others = np.flatnonzero(few), np.flatnonzero(~few)
    decode = _tile(starts, lens, past, chosen, MAX_GROUP // group, window)
    prefill = _tile(starts, lens, past, others, max(tile_rows // group, 1), window)
    blocks = max(target_blocks // kv_heads, 1)
    decode, merges, num_slots = _split(decode, blocks)
    return AttentionPlan(decode.astype(np.int32), _longest_first(prefill).astype(np.int32), merges, num_slots)


def most_items(rows: int, target_blocks: int, kv_heads: int) -> int:
    """The most decode items of a plan of ``rows`` rows (of one query each, or few)."""
    return rows + max(target_blocks // kv_heads, 1)


def most_slots(target_blocks: int, kv_heads: int) -> int:
    """The most partial results of a plan: a row that is cut has at most twice as many pieces as even shares."""
    return 2 * max(target_blocks // kv_heads, 1)


def _tile(starts: Int64, lens: Int64, past: Int64, rows: Int64, queries: int, window: int) -> Int64:
    """Items of ``queries`` consecutive queries of ``rows``, over all the KV positions that any of them sees."""
    if not len(rows):
        return np.zeros((0, ITEM_FIELDS), np.int64)
    first = np.zeros_like(rows)
    count = lens[rows]
    if count.max() > queries:
        tiles = -(-count // queries)
        rows = np.repeat(rows, tiles)
        first = (np.arange(len(rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * queries
        count = np.minimum(lens[rows] - first, queries)
    position = past[rows] + first
    items = np.zeros((len(rows), ITEM_FIELDS), np.int64)
    items[:, 0] = rows
    items[:, 1] = starts[rows] + first
    items[:, 2] = count
    items[:, 3] = position
    if window > 0:
        items[:, 4] = np.maximum(position - window + 1, 0)
    items[:, 5] = position + count
    items[:, 6] = -1
    return items


def _split(items: Int64, blocks: int) -> tuple[Int64, Int32, int]:
    """Cut the KV ranges so that about ``blocks`` items result, all of about the same length.

    The pieces' length is the shortest for which they are at most ``blocks``: short rows stay whole, and long ones are
    cut into equal parts. Where there are more rows than that, those much longer than a block's even share of the work
    are cut none the less, so that none runs on when all others are done. At most ``most_items`` result.
    """
    units = -(-items[:, 5] // SPLIT_UNIT) - items[:, 4] // SPLIT_UNIT
    shortest, longest, total = MIN_SPLIT // SPLIT_UNIT, int(units.max(initial=1)), int(units.sum())

    def pieces_of(length: int) -> Int64:
        return np.maximum(-(-units // length), 1)

    if len(items) >= blocks:
        length = longest
    else:  # between what an even cut without remainders would be, and one where every item has a remainder
        low, high = max(shortest, -(-total // blocks)), max(shortest, -(-total // (blocks - len(items))))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if int(pieces_of(middle).sum()) <= blocks else (middle + 1, high)
        length = low
    length = max(shortest, min(length, math.ceil(EVEN_SHARE * total / blocks)))
    if longest <= length:
        return _longest_first(items), np.zeros((0, 4), np.int32), 0
    pieces = pieces_of(length)
    index = np.repeat(np.arange(len(items)), pieces)
    ordinal = np.arange(len(index)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut = items[index]
    first_unit = items[index, 4] // SPLIT_UNIT
    begin = (first_unit + ordinal * units[index] // pieces[index]) * SPLIT_UNIT
    end = (first_unit + (ordinal + 1) * units[index] // pieces[index]) * SPLIT_UNIT
    cut[:, 4] = np.maximum(begin, items[index, 4])
    cut[:, 5] = np.maximum(np.minimum(end, items[index, 5]), cut[:, 4])
    partial = pieces[index] > 1
    cut[partial, 6] = np.arange(int(partial.sum()))
    split = pieces > 1
    slots = pieces[split]
    merges = np.stack([items[split, 1], items[split, 2], np.cumsum(slots) - slots, slots], axis=1)
    return _longest_first(cut), merges.astype(np.int32), int(slots.sum())


def _longest_first(items: Int64) -> Int64:
    """Long blocks start first, short ones fill the gaps at the end."""
    return items[np.argsort(items[:, 4] - items[:, 5], kind="stable")]
