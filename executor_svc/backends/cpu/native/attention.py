"""Paged attention: one item is a few consecutive queries of one row, for all query heads of one KV head.

Keys lie in panels of 16 tokens, [slots / 16][KV heads][head_dim][16]; values in groups of 16 tokens,
[slots / 16][KV heads][16][head_dim]: a cache *slot* is block * block_size + offset. An item walks its sequence from
position 0 in tiles of KV_TILE tokens with an online softmax, so a query's bits depend on its position alone, not on
which item or step it came in. A window starts the walk at the first query's first visible page; what later queries
of the item do not see of it weighs 0. Unwritten keys are computed and masked; unwritten values are never read.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from executor_svc.backends.cpu.native.attention_tiles import (
    AHEAD,
    ATTENTION_TILES_AVX2,
    ATTENTION_TILES_AVX512,
    make_accumulate,
    make_score,
)
from executor_svc.backends.cpu.native.gemm import BYTES
from executor_svc.backends.cpu.native.layout import (
    ATTENDED,
    BEFORE_SCORE_CAP,
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
    SCORE_CAP,
    SOFTMAX_FACTOR,
    VALUES,
    WINDOW,
)  # fmt: skip
from executor_svc.backends.cpu.native.rows import (
    KV_TILE,
    clear_row,
    copy_row,
    copy_row_from_half,
    copy_row_to_half,
    divide_row,
    hide_row,
    softcap_row,
    softmax_row,
)
from executor_svc.backends.cpu.native.vector import (
    LANES,
    load_float,
    load_half,
    load_int,
    store_float,
    store_half,
    store_int,
)

WIDENED_ROWS = 12  # an item of more rows widens a float16 page once, not at each register tile: the same bits
PAGES = KV_TILE // LANES  # of a tile; a page here is 16 tokens, whatever the size of a block


def scratch_floats(head_dim: int) -> int:
    """Floats of scratch of one thread: queries, outputs, scores, running state, gathered pages, page tables."""
    rows = 2 * QUERY_ROWS * head_dim + QUERY_ROWS * KV_TILE + QUERY_ROWS * (LANES + 2)
    return rows + 2 * KV_TILE * head_dim + 2 * 2 * AHEAD // 4


@njit(nogil=True, error_model="numpy")
def slot_of(table, position, block_size):  # type: ignore[no-untyped-def]
    """The cache slot of a position; ``table``: int64 block ids of the row."""
    return load_int(table + 8 * (position // block_size)) * block_size + position % block_size


def make_pages(kv_type: str) -> tuple[Any, Any]:
    """Compiled ``page_of`` and ``write_kv`` for a cache of float32 or float16."""
    element = BYTES[kv_type]
    load, store, copy = (
        (load_half, store_half, copy_row_to_half) if kv_type == "float16" else (load_float, store_float, copy_row)
    )

    @njit(nogil=True, error_model="numpy")
    def page_of(cache, table, position, count, block_size, heads, head, size, token_step, step, scratch):  # type: ignore[no-untyped-def]
        """Address of the page of 16 tokens from ``position``, a multiple of 16: gathered where blocks do not align.
        Elements from a token to the next, and from one of a token's own to the next: 1 and 16 for a panel of keys,
        ``size`` and 1 for a group of values."""
        page_bytes = size * LANES * element
        if block_size % LANES == 0:
            return cache + (slot_of(table, position, block_size) // LANES * heads + head) * page_bytes
        for lane in range(count):
            slot = slot_of(table, position + lane, block_size)
            source = cache + (slot // LANES * heads + head) * page_bytes + slot % LANES * token_step * element
            for i in range(size):
                store(scratch + (lane * token_step + i * step) * element, load(source + i * step * element))
        return scratch

    @njit(nogil=True, error_model="numpy")
    def write_kv(k, v, keys, values, slot, heads, size):  # type: ignore[no-untyped-def]
        """File one token's keys and values (all KV heads, [heads][head_dim] each) under its cache slot."""
        group, lane = slot // LANES, slot % LANES
        for head in range(heads):
            base = (group * heads + head) * size * LANES * element
            for i in range(size):
                store(keys + base + (i * LANES + lane) * element, load_float(k + (head * size + i) * 4))
            copy(v + head * size * 4, values + base + lane * size * element, size // LANES)

    return page_of, write_kv


def make_attend_item(kv_type: str, avx512: bool) -> Any:
    """A compiled ``attend_item(step, model, layer, item, head, scratch)``; ``kv_type``: the cache's element type."""
    tiles = ATTENTION_TILES_AVX512 if avx512 else ATTENTION_TILES_AVX2
    score, accumulate = make_score(tiles, kv_type), make_accumulate(tiles, kv_type)
    page_of, _ = make_pages(kv_type)
    half = kv_type == "float16"
    score_widened, accumulate_widened = score, accumulate
    if half:
        score_widened, accumulate_widened = make_score(tiles, "float32"), make_accumulate(tiles, "float32")

    @njit(nogil=True, error_model="numpy")
    def attend_item(step, model, layer, item, head, scratch):  # type: ignore[no-untyped-def]
        size, group, heads = model[HEAD_DIM], model[GROUP], model[KV_HEADS]
        block_size, q_size = model[BLOCK_SIZE], model[Q_SIZE]
        keys, values, window = load_int(layer + 8 * KEYS), load_int(layer + 8 * VALUES), load_int(layer + 8 * WINDOW)
        factor = load_float(model[FLOATS] + 4 * SOFTMAX_FACTOR)
        cap, before_cap = load_float(model[FLOATS] + 4 * SCORE_CAP), load_float(model[FLOATS] + 4 * BEFORE_SCORE_CAP)
        entry = step[ITEMS] + item * ITEM_SIZE * 8
        token, count = load_int(entry + 8 * ITEM_TOKEN), load_int(entry + 8 * ITEM_COUNT)
        first = load_int(entry + 8 * ITEM_POSITION)
        blocks = step[BLOCK_TABLES] + load_int(entry + 8 * ITEM_ROW) * step[MAX_BLOCKS] * 8
        rows, row_bytes, vectors = count * group, size * 4, size // LANES
        q = scratch
        out = q + QUERY_ROWS * row_bytes
        scores = out + QUERY_ROWS * row_bytes
        total = scores + QUERY_ROWS * KV_TILE * 4
        largest = total + QUERY_ROWS * LANES * 4
        correction = largest + QUERY_ROWS * 4
        key_pages = correction + QUERY_ROWS * 4
        value_pages = key_pages + 2 * AHEAD
        gathered = value_pages + 2 * AHEAD
        width = q_size + 2 * model[KV_SIZE]
        for i in range(count):
            for g in range(group):
                r = i * group + g
                source = step[QKV_OUT] + ((token + i) * width + (head * group + g) * size) * 4
                copy_row(source, q + r * row_bytes, vectors)
                store_float(largest + 4 * r, -float("inf"))
        clear_row(total, rows)
        clear_row(out, rows * vectors)
        end = first + count  # one past the last visible position
        begin = max(first + 1 - window, 0) if window > 0 else 0  # the first query's first visible position
        widened = half and rows > WIDENED_ROWS and block_size % LANES == 0
        for base in range(begin // KV_TILE * KV_TILE, end, KV_TILE):
            skipped = max(begin - base, 0) // LANES  # pages of this tile that no query sees
            tokens = min(KV_TILE, end - base)
            pages = (tokens + LANES - 1) // LANES
            for p in range(skipped, pages):
                n, at = min(LANES, tokens - p * LANES), gathered + p * LANES * row_bytes
                position = base + p * LANES
                key = page_of(keys, blocks, position, n, block_size, heads, head, size, 1, LANES, at)
                if widened:
                    copy_row_from_half(key, at, size)
                    key = at
                at += KV_TILE * row_bytes
                value = page_of(values, blocks, position, n, block_size, heads, head, size, size, 1, at)
                if widened:
                    copy_row_from_half(value, at, n * vectors)
                    value = at
                store_int(key_pages + 8 * p, key)
                store_int(value_pages + 8 * p, value)
                # The same page of the next tile is fetched meanwhile; where there is none this one, for nothing.
                if block_size % LANES == 0 and position + KV_TILE < end and not widened:
                    later = position + KV_TILE
                    key = page_of(keys, blocks, later, n, block_size, heads, head, size, 1, LANES, 0)
                    value = page_of(values, blocks, later, n, block_size, heads, head, size, size, 1, 0)
                store_int(key_pages + AHEAD + 8 * p, key)
                store_int(value_pages + AHEAD + 8 * p, value)
            shift = skipped * LANES * 4
            if widened:
                score_widened(
                    rows, pages - skipped, q, row_bytes, key_pages + 8 * skipped, size, scores + shift, 4 * KV_TILE
                )  # fmt: skip
            else:
                score(
                    rows, pages - skipped, q, row_bytes, key_pages + 8 * skipped, size, scores + shift, 4 * KV_TILE
                )  # fmt: skip
            for i in range(count):
                visible = first + i + 1 - base
                hidden = visible - window if window > 0 else 0
                if hidden >= min(visible, KV_TILE):
                    visible = 0
                for r in range(i * group, (i + 1) * group):
                    row = scores + r * KV_TILE * 4
                    if cap != 0.0:
                        softcap_row(row, KV_TILE // LANES, before_cap, cap)
                    if hidden > 0:
                        hide_row(row, hidden)
                    softmax_row(row, visible, largest + 4 * r, total + 4 * LANES * r, correction + 4 * r, factor)
            if widened:
                accumulate_widened(
                    rows, vectors, scores + shift, 4 * KV_TILE, value_pages + 8 * skipped, tokens - skipped * LANES,
                    row_bytes, out, correction,
                )  # fmt: skip
            else:
                accumulate(
                    rows, vectors, scores + shift, 4 * KV_TILE, value_pages + 8 * skipped, tokens - skipped * LANES,
                    row_bytes, out, correction,
                )  # fmt: skip
        for i in range(count):
            for g in range(group):
                r = i * group + g
                target = step[ATTENDED] + ((token + i) * q_size + (head * group + g) * size) * 4
                divide_row(out + r * row_bytes, target, vectors, total + 4 * LANES * r)

    return attend_item
