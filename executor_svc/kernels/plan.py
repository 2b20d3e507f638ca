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
    few = np.ones(len(lens), bool) if tile_rows == 0 else lens * group <= MAX_GROUP
    decode = _tile(starts, lens, past, few, MAX_GROUP // group, window)
    prefill = _tile(starts, lens, past, ~few, max(tile_rows // group, 1), window)
    blocks = max(target_blocks // kv_heads, 1)
    decode, merges, num_slots = _split(decode, blocks)
    return AttentionPlan(decode.astype(np.int32), _longest_first(prefill).astype(np.int32), merges, num_slots)


def most_items(rows: int, target_blocks: int, kv_heads: int) -> int:
    """The most decode items of a plan of ``rows`` rows (of one query each, or few)."""
    return rows + max(target_blocks // kv_heads, 1)


def most_slots(target_blocks: int, kv_heads: int) -> int:
    """The most partial results of a plan: a row that is cut has at most twice as many pieces as even shares."""
    return 2 * max(target_blocks // kv_heads, 1)


def _tile(starts: Int64, lens: Int64, past: Int64, chosen: npt.NDArray[np.bool_], queries: int, window: int) -> Int64:
    """Items of ``queries`` consecutive queries of the chosen rows, over all the KV positions that any of them sees."""
    rows = np.flatnonzero(chosen)
    tiles = -(-lens[rows] // queries)
    item_rows = np.repeat(rows, tiles)
    ordinal = np.arange(len(item_rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first = ordinal * queries
    count = np.minimum(lens[item_rows] - first, queries)
    position = past[item_rows] + first
    kv_begin = np.maximum(position - window + 1, 0) if window > 0 else np.zeros_like(position)
    items = np.zeros((len(item_rows), ITEM_FIELDS), np.int64)
    items[:, :7] = np.stack(
        [item_rows, starts[item_rows] + first, count, position, kv_begin, position + count, np.full(len(first), -1)],
        axis=1,
    )
    return items


def _split(items: Int64, blocks: int) -> tuple[Int64, Int32, int]:
    """Cut the KV ranges so that about ``blocks`` items result, all of about the same length.

    The pieces' length is the shortest for which they are at most ``blocks``: short rows stay whole, and long ones are
    cut into equal parts. Where there are more rows than that, those much longer than a block's even share of the work
    are cut none the less, so that none runs on when all others are done. At most ``most_items`` result.
    """
    units = -(-items[:, 5] // SPLIT_UNIT) - items[:, 4] // SPLIT_UNIT

    def pieces_of(length: int) -> Int64:
        return np.maximum(-(-units // length), 1)

    def fits(length: int) -> bool:
        return int(pieces_of(length).sum()) <= max(blocks, len(items))

    low, high = MIN_SPLIT // SPLIT_UNIT, max(int(units.max(initial=1)), MIN_SPLIT // SPLIT_UNIT)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    even = math.ceil(EVEN_SHARE * int(units.sum()) / blocks)
    low = min(low, max(MIN_SPLIT // SPLIT_UNIT, even))
    pieces = pieces_of(low)
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
