"""A mixture of experts: each token's MLP output is a weighted sum over the few experts it is sent to.

The router's logits and choice are one token's own; rows are then sorted by expert, so that each expert's product runs
over consecutive rows through the same register tiles as any other; a token's parts are added in the order of their
rank. So nothing depends on what else is in the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from executor_svc.backends.cpu.native.gemm import pack_panels
from executor_svc.backends.cpu.native.layout import (
    BLOCK_ENTRY,
    DELTA,
    EXPERT_BLOCKS,
    EXPERT_COUNTS,
    EXPERT_IDS,
    EXPERT_IN,
    EXPERT_OUT,
    EXPERT_WEIGHTS,
    EXPERTS_PER_TOKEN,
    HIDDEN,
    NORMALIZE_EXPERTS,
    NORMED,
    NUM_EXPERTS,
    PLACES,
    ROUTER,
    ROW_BLOCK,
    SOURCES,
)  # fmt: skip
from executor_svc.backends.cpu.native.phases import finish, take
from executor_svc.backends.cpu.native.product import most_blocks
from executor_svc.backends.cpu.native.rows import add_scaled_row, clear_row, copy_row
from executor_svc.backends.cpu.native.vector import (
    I64,
    LANES,
    Emitter,
    kernel,
    load_float,
    load_int,
    store_float,
    store_int,
)

ROUTER_PANELS = 4  # of one router tile; the router is padded to a multiple
_TOKENS_PER_ITEM = 4


def pack_router(weight: torch.Tensor) -> torch.Tensor:
    """[E, hidden] -> float32 panels [.., hidden, 16]: kept exact, being small and deciding much."""
    padded = torch.nn.functional.pad(weight.float(), (0, 0, 0, -len(weight) % (ROUTER_PANELS * LANES)))
    return pack_panels(padded, "float32")


def router_scratch_floats(experts: int) -> int:
    return experts + ROUTER_PANELS * LANES + 1


@kernel(5)
def router_tile(e: Emitter, x: Any, w: Any, panel_step: Any, k: Any, y: Any) -> None:
    """y [16 ROUTER_PANELS] = x [k] w for one row, float32; ``panel_step`` in bytes."""
    panels = [e.at(w, e.b.mul(panel_step, I64(p))) for p in range(ROUTER_PANELS)]

    def step(index: Any, sums: list[Any]) -> list[Any]:
        value = e.broadcast(e.load_scalar(e.at(x, e.b.mul(index, I64(4)))))
        offset = e.b.mul(index, I64(4 * LANES))
        return [e.fma(value, e.load(e.at(panels[p], offset)), sums[p]) for p in range(ROUTER_PANELS)]

    for p, total in enumerate(e.loop(k, [e.constant(0.0)] * ROUTER_PANELS, step)):
        e.store(total, e.at(y, 4 * LANES * p))


@kernel(3, 1)
def exp_row(e: Emitter, x: Any, vectors: Any, total: Any, largest: Any) -> None:
    """x = exp(x - largest), in place; their sum to ``total``."""
    base = e.broadcast(largest)

    def step(index: Any, state: list[Any]) -> list[Any]:
        address = e.at(x, e.b.mul(index, I64(4 * LANES)))
        value = e.exp(e.b.fsub(e.load(address), base))
        e.store(value, address)
        return [e.b.fadd(state[0], value)]

    e.store_scalar(e.reduce(e.loop(vectors, [e.constant(0.0)], step)[0], e.b.fadd), total)


@njit(nogil=True, error_model="numpy")
def route_token(model, router, x, ids, weights, scratch):  # type: ignore[no-untyped-def]
    """The likeliest experts of one token, by softmax over all, ties to the lower id: int64 ids and float32 weights.

    ``scratch``: room for the padded router's logits and one more float.
    """
    hidden, experts, per_token = model[HIDDEN], model[NUM_EXPERTS], model[EXPERTS_PER_TOKEN]
    width = ROUTER_PANELS * LANES
    padded = (experts + width - 1) // width * width
    for first in range(0, padded, width):
        router_tile(x, router + first * hidden * 4, hidden * LANES * 4, hidden, scratch + first * 4)
    largest = load_float(scratch)
    for expert in range(experts):
        largest = max(largest, load_float(scratch + expert * 4))
    for expert in range(experts, padded):
        store_float(scratch + expert * 4, -float("inf"))
    total = scratch + padded * 4
    exp_row(scratch, padded // LANES, total, largest)
    scale = load_float(total)
    chosen_total = np.float32(0.0)
    for rank in range(per_token):
        best, value = rank, np.float32(-1.0)  # NaN chooses something too
        for expert in range(experts):
            candidate = load_float(scratch + expert * 4)
            if candidate > value:
                best, value = expert, candidate
        value = load_float(scratch + best * 4) / scale
        store_float(scratch + best * 4, -2.0)
        store_int(ids + rank * 8, best)
        store_float(weights + rank * 4, value)
        chosen_total += value
    if model[NORMALIZE_EXPERTS] != 0:
        for rank in range(per_token):
            store_float(weights + rank * 4, load_float(weights + rank * 4) / chosen_total)


@njit(nogil=True, error_model="numpy")
def route_phase(counter, step, model, layer, rows, scratch):  # type: ignore[no-untyped-def]
    hidden, per_token, router = model[HIDDEN], model[EXPERTS_PER_TOKEN], load_int(layer + 8 * ROUTER)
    items, done = (rows + _TOKENS_PER_ITEM - 1) // _TOKENS_PER_ITEM, 0
    while True:
        item = take(counter, items)
        if item == items:
            break
        for row in range(item * _TOKENS_PER_ITEM, min((item + 1) * _TOKENS_PER_ITEM, rows)):
            at = row * per_token
            x = step[NORMED] + row * hidden * 4
            route_token(model, router, x, step[EXPERT_IDS] + at * 8, step[EXPERT_WEIGHTS] + at * 4, scratch)
        done += 1
    finish(counter, done, items)


@njit(nogil=True, error_model="numpy")
def sort_phase(counter, step, model, rows):  # type: ignore[no-untyped-def]
    """Each (row, rank) gets a place among its expert's rows; experts' rows are cut into blocks. By one thread."""
    per_token, counts = model[EXPERTS_PER_TOKEN], step[EXPERT_COUNTS]
    done = 0
    if take(counter, 1) == 0:
        for expert in range(model[NUM_EXPERTS]):
            store_int(counts + 8 * expert, 0)
        for entry in range(rows * per_token):
            count = counts + 8 * load_int(step[EXPERT_IDS] + 8 * entry)
            store_int(count, load_int(count) + 1)
        first, blocks = 0, 0
        for expert in range(model[NUM_EXPERTS]):
            count = load_int(counts + 8 * expert)
            for row in range(0, count, ROW_BLOCK):
                block = step[EXPERT_BLOCKS] + blocks * BLOCK_ENTRY * 8
                store_int(block, expert)
                store_int(block + 8, first + row)
                store_int(block + 16, min(ROW_BLOCK, count - row))
                blocks += 1
            store_int(counts + 8 * expert, first)
            first += count
        for block in range(blocks, most_blocks(model[NUM_EXPERTS], rows * per_token)):
            store_int(step[EXPERT_BLOCKS] + block * BLOCK_ENTRY * 8 + 16, 0)
        for entry in range(rows * per_token):
            count = counts + 8 * load_int(step[EXPERT_IDS] + 8 * entry)
            place = load_int(count)
            store_int(count, place + 1)
            store_int(step[PLACES] + 8 * entry, place)
            store_int(step[SOURCES] + 8 * place, entry // per_token)
        done = 1
    finish(counter, done, 1)


@njit(nogil=True, error_model="numpy")
def spread_phase(counter, step, model, rows):  # type: ignore[no-untyped-def]
    """Copies the rows into the experts' order."""
    hidden, entries, done = model[HIDDEN], rows * model[EXPERTS_PER_TOKEN], 0
    items = (entries + _TOKENS_PER_ITEM - 1) // _TOKENS_PER_ITEM
    while True:
        item = take(counter, items)
        if item == items:
            break
        for place in range(item * _TOKENS_PER_ITEM, min((item + 1) * _TOKENS_PER_ITEM, entries)):
            source = step[NORMED] + load_int(step[SOURCES] + 8 * place) * hidden * 4
            copy_row(source, step[EXPERT_IN] + place * hidden * 4, hidden // LANES)
        done += 1
    finish(counter, done, items)


@njit(nogil=True, error_model="numpy")
def combine_phase(counter, step, model, rows):  # type: ignore[no-untyped-def]
    """delta = the weighted sum of each row's parts, by rank."""
    hidden, per_token, done = model[HIDDEN], model[EXPERTS_PER_TOKEN], 0
    items = (rows + _TOKENS_PER_ITEM - 1) // _TOKENS_PER_ITEM
    while True:
        item = take(counter, items)
        if item == items:
            break
        for row in range(item * _TOKENS_PER_ITEM, min((item + 1) * _TOKENS_PER_ITEM, rows)):
            delta = step[DELTA] + row * hidden * 4
            clear_row(delta, hidden // LANES)
            for entry in range(row * per_token, (row + 1) * per_token):
                part = step[EXPERT_OUT] + load_int(step[PLACES] + 8 * entry) * hidden * 4
                add_scaled_row(delta, part, hidden // LANES, load_float(step[EXPERT_WEIGHTS] + 4 * entry))
        done += 1
    finish(counter, done, items)
