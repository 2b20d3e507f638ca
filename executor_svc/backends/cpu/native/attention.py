"""Paged attention: one item is a few consecutive queries of one row, for all query heads of one KV head.

Keys lie in panels of 16 tokens, [slots / 16][KV heads][head_dim][16]; values in groups of 16 tokens,
[slots / 16][KV heads][16][head_dim]: a cache *slot* is block * block_size + offset. An item walks its sequence from
position 0 in tiles of KV_TILE tokens with an online softmax, so a query's bits depend on its position alone, not on
which item or step it came in. Unwritten keys are computed and masked; unwritten values are never read.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from executor_svc.backends.cpu.native.gemm import make_block
from executor_svc.backends.cpu.native.layout import (
    ATTENDED,
    BLOCK_SIZE,
    BLOCK_TABLES,
    FLOATS,
    GROUP,
    HEAD_DIM,
    ITEM_COUNT,
    ITEM_POSITION,
    ITEM_ROW,
    ITEM_SIZE,
    ITEM_TOKEN,
    ITEMS,
    KEYS,
    KV_HEADS,
    KV_SIZE,
    MAX_BLOCKS,
    Q_SIZE,
    QKV_OUT,
    QUERY_ROWS,
    SCALE,
    VALUES,
)  # fmt: skip
from executor_svc.backends.cpu.native.rows import KV_TILE, copy_row, scale_row, softmax_row
from executor_svc.backends.cpu.native.vector import LANES, load_float, load_int, store_float


def scratch_floats(head_dim: int) -> int:
    """Floats of scratch that one thread's items need."""
    rows = 2 * QUERY_ROWS * head_dim + QUERY_ROWS * KV_TILE + 4 * QUERY_ROWS
    return rows + 2 * LANES * head_dim


@njit(nogil=True, error_model="numpy")
def slot_of(table, position, block_size):  # type: ignore[no-untyped-def]
    """The cache slot of a position; ``table``: int64 block ids of the row."""
    return load_int(table + 8 * (position // block_size)) * block_size + position % block_size


@njit(nogil=True, error_model="numpy")
def key_panel(keys, table, position, count, block_size, heads, head, size, scratch):  # type: ignore[no-untyped-def]
    """Address of the panel of 16 tokens from ``position`` (a multiple of 16); gathered where blocks do not align."""
    if block_size % LANES == 0:
        group = slot_of(table, position, block_size) // LANES
        return keys + (group * heads + head) * size * LANES * 4
    for lane in range(count):
        slot = slot_of(table, position + lane, block_size)
        source = keys + ((slot // LANES * heads + head) * size * LANES + slot % LANES) * 4
        for i in range(size):
            store_float(scratch + (i * LANES + lane) * 4, load_float(source + i * LANES * 4))
    return scratch


@njit(nogil=True, error_model="numpy")
def value_group(values, table, position, count, block_size, heads, head, size, scratch):  # type: ignore[no-untyped-def]
    """Address of [16][head_dim] values from ``position``; gathered where blocks do not align."""
    if block_size % LANES == 0:
        group = slot_of(table, position, block_size) // LANES
        return values + (group * heads + head) * size * LANES * 4
    for lane in range(count):
        slot = slot_of(table, position + lane, block_size)
        source = values + ((slot // LANES * heads + head) * LANES + slot % LANES) * size * 4
        for i in range(size):
            store_float(scratch + (lane * size + i) * 4, load_float(source + i * 4))
    return scratch


@njit(nogil=True, error_model="numpy")
def write_kv(k, v, keys, values, slot, heads, size):  # type: ignore[no-untyped-def]
    """File one token's keys and values (all KV heads, [heads][head_dim] each) under its cache slot."""
    group, lane = slot // LANES, slot % LANES
    for head in range(heads):
        base = (group * heads + head) * size * LANES * 4
        for i in range(size):
            store_float(keys + base + (i * LANES + lane) * 4, load_float(k + (head * size + i) * 4))
        copy_row(v + head * size * 4, values + base + lane * size * 4, size // LANES)


def make_attend_item(score_tiles: dict[int, int], value_tiles: dict[int, int]) -> Any:
    """A compiled ``attend_item(step, model, layer, item, head, scratch)``; tiles as for ``make_block``."""
    score = make_block("float32", False, score_tiles)
    accumulate = make_block("float32", True, value_tiles)

    @njit(nogil=True, error_model="numpy")
    def attend_item(step, model, layer, item, head, scratch):  # type: ignore[no-untyped-def]
        size, group, heads = model[HEAD_DIM], model[GROUP], model[KV_HEADS]
        block_size, q_size = model[BLOCK_SIZE], model[Q_SIZE]
        keys, values = load_int(layer + 8 * KEYS), load_int(layer + 8 * VALUES)
        entry = step[ITEMS] + item * ITEM_SIZE * 8
        token, count = load_int(entry + 8 * ITEM_TOKEN), load_int(entry + 8 * ITEM_COUNT)
        first = load_int(entry + 8 * ITEM_POSITION)
        table = step[BLOCK_TABLES] + load_int(entry + 8 * ITEM_ROW) * step[MAX_BLOCKS] * 8
        scale = load_float(model[FLOATS] + 4 * SCALE)
        rows, row_bytes = count * group, size * 4
        q = scratch
        out = q + QUERY_ROWS * row_bytes
        scores = out + QUERY_ROWS * row_bytes
        largest = scores + QUERY_ROWS * KV_TILE * 4
        total = largest + QUERY_ROWS * 4
        correction = total + QUERY_ROWS * 4
        ones = correction + QUERY_ROWS * 4
        gathered = ones + QUERY_ROWS * 4
        width = q_size + 2 * model[KV_SIZE]
        for r in range(rows):
            source = step[QKV_OUT] + ((token + r // group) * width + (head * group + r % group) * size) * 4
            copy_row(source, q + r * row_bytes, size // LANES)
            store_float(largest + 4 * r, -float("inf"))
            store_float(total + 4 * r, 0.0)
            store_float(ones + 4 * r, 1.0)
            for i in range(size):
                store_float(out + r * row_bytes + 4 * i, 0.0)
        end = first + count  # one past the last visible position
        for base in range(0, end, KV_TILE):
            in_tile = min(KV_TILE, end - base)
            for g in range(0, in_tile, LANES):
                n = min(LANES, in_tile - g)
                panel = key_panel(keys, table, base + g, n, block_size, heads, head, size, gathered)
                score(rows, 1, q, row_bytes, panel, 4 * LANES, 0, size, scores + 4 * g, 4 * KV_TILE, ones)
            for r in range(rows):
                softmax_row(
                    scores + r * KV_TILE * 4, first + r // group + 1 - base, largest + 4 * r, total + 4 * r,
                    correction + 4 * r, scale,
                )  # fmt: skip
            for g in range(0, in_tile, LANES):
                n = min(LANES, in_tile - g)
                value = value_group(
                    values, table, base + g, n, block_size, heads, head, size, gathered + LANES * row_bytes
                )
                accumulate(
                    rows, size // LANES, scores + 4 * g, 4 * KV_TILE, value, row_bytes, 4 * LANES, n, out, row_bytes,
                    correction if g == 0 else ones,
                )  # fmt: skip
        for r in range(rows):
            target = step[ATTENDED] + ((token + r // group) * q_size + (head * group + r % group) * size) * 4
            scale_row(out + r * row_bytes, target, size // LANES, load_float(total + 4 * r))

    return attend_item
