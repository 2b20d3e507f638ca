"""The compiled forward: every phase of every layer, run by each thread of the team from top to bottom."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray, cfunc, njit, types

from executor_svc.backends.cpu.native.attention import make_attend_item, write_kv
from executor_svc.backends.cpu.native.gemm import TILES_AVX2, TILES_AVX512
from executor_svc.backends.cpu.native.layout import (
    ACTIVATED,
    ATTENDED,
    ATTENDED_WANTED,
    COUNTER_BYTES,
    COUNTERS,
    CYCLES_OFFSET,
    DELTA,
    DOWN,
    EPSILON,
    FINAL_NORM,
    FLOATS,
    GATE_UP,
    GATE_UP_OUT,
    HEAD,
    HEAD_DIM,
    HIDDEN,
    INPUT_NORM,
    INTERMEDIATE,
    INVERSE_HIDDEN,
    KEYS,
    KV_HEADS,
    KV_SIZE,
    KV_SLOTS,
    LAYER_SIZE,
    LAYERS,
    LOGITS,
    MODEL,
    MODEL_SIZE,
    NORMED,
    NUM_ITEMS,
    NUM_LAYERS,
    OUTPUT,
    POSITIONS,
    POST_NORM,
    Q_SIZE,
    QKV,
    QKV_OUT,
    ROPE,
    SCRATCH,
    SCRATCH_BYTES,
    STEP_SIZE,
    TOKENS,
    VALUES,
    VOCAB_PANELS,
    WANTED,
    WANTED_INDICES,
    X_WANTED,
    X,
)  # fmt: skip
from executor_svc.backends.cpu.native.phases import finish, take
from executor_svc.backends.cpu.native.product import make_product_phase
from executor_svc.backends.cpu.native.rows import add_norm_row, copy_row, rotate_head
from executor_svc.backends.cpu.native.vector import LANES, as_pointer, atomic_add, load_float, load_int, store_cycles

ROWS_PER_ITEM = 4  # rows of one norm or rotary item


@njit(nogil=True, error_model="numpy")
def norm_phase(counter, model, rows, x, delta, weight, out, add):  # type: ignore[no-untyped-def]
    hidden, done = model[HIDDEN], 0
    items = (rows + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM
    inverse, epsilon = load_float(model[FLOATS] + 4 * INVERSE_HIDDEN), load_float(model[FLOATS] + 4 * EPSILON)
    while True:
        item = take(counter, items)
        if item == items:
            break
        for row in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, rows)):
            at = row * hidden * 4
            add_norm_row(x + at, delta + at, weight, out + at, hidden // LANES, add, inverse, epsilon)
        done += 1
    finish(counter, done, items)


@njit(nogil=True, error_model="numpy")
def rotary_phase(counter, step, model, layer):  # type: ignore[no-untyped-def]
    size, heads = model[HEAD_DIM], model[KV_HEADS]
    q_size, kv_size, done = model[Q_SIZE], model[KV_SIZE], 0
    items = (step[TOKENS] + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM
    keys, values = load_int(layer + 8 * KEYS), load_int(layer + 8 * VALUES)
    while True:
        item = take(counter, items)
        if item == items:
            break
        for token in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, step[TOKENS])):
            row = step[QKV_OUT] + token * (q_size + 2 * kv_size) * 4
            table = model[ROPE] + load_int(step[POSITIONS] + 8 * token) * size * 4
            for i in range((q_size + kv_size) // size):
                rotate_head(row + i * size * 4, table, size // 2)
            slot = load_int(step[KV_SLOTS] + 8 * token)
            write_kv(row + q_size * 4, row + (q_size + kv_size) * 4, keys, values, slot, heads, size)
        done += 1
    finish(counter, done, items)


@njit(nogil=True, error_model="numpy")
def gather_phase(counter, step, model):  # type: ignore[no-untyped-def]
    """The rows whose logits are wanted: residual and attention output, packed."""
    hidden, q_size, done, items = model[HIDDEN], model[Q_SIZE], 0, step[WANTED]
    while True:
        item = take(counter, items)
        if item == items:
            break
        token = load_int(step[WANTED_INDICES] + 8 * item)
        copy_row(step[X] + token * hidden * 4, step[X_WANTED] + item * hidden * 4, hidden // LANES)
        copy_row(step[ATTENDED] + token * q_size * 4, step[ATTENDED_WANTED] + item * q_size * 4, q_size // LANES)
        done += 1
    finish(counter, done, items)


@cache
def make_forward(weights: str, avx512: bool) -> Any:
    """The compiled entry point, ``void(step table)``, for one weight type; to be called by every thread of a team.

    AVX-512 and AVX2 differ in register tiles only, which do not change any result.
    """
    tiles = TILES_AVX512 if avx512 else TILES_AVX2
    product_phase = make_product_phase(weights, tiles)
    attend_item = make_attend_item(dict.fromkeys(tiles, 1), tiles)

    @njit(nogil=True, error_model="numpy")
    def attention_phase(counter, step, model, layer, scratch):  # type: ignore[no-untyped-def]
        heads, done = model[KV_HEADS], 0
        items = step[NUM_ITEMS] * heads
        while True:
            item = take(counter, items)
            if item == items:
                break
            attend_item(step, model, layer, item // heads, item % heads, scratch)
            done += 1
        finish(counter, done, items)

    @njit(nogil=True, error_model="numpy")
    def run(step, model):  # type: ignore[no-untyped-def]
        counter = step[COUNTERS]
        scratch = step[SCRATCH] + atomic_add(counter, 1) * step[SCRATCH_BYTES]
        store_cycles(counter + CYCLES_OFFSET)
        counter += COUNTER_BYTES
        rows, x, attended = step[TOKENS], step[X], step[ATTENDED]
        hidden, q_size, intermediate = model[HIDDEN], model[Q_SIZE], model[INTERMEDIATE]
        qkv_panels = (q_size + 2 * model[KV_SIZE]) // LANES
        for index in range(model[NUM_LAYERS]):
            layer = model[LAYERS] + index * LAYER_SIZE * 8
            norm = load_int(layer + 8 * INPUT_NORM)
            norm_phase(counter, model, rows, x, step[DELTA], norm, step[NORMED], min(index, 1))
            counter += COUNTER_BYTES
            qkv = load_int(layer + 8 * QKV)
            product_phase(counter, step, rows, qkv_panels, step[NORMED], hidden, qkv, step[QKV_OUT], 0)
            counter += COUNTER_BYTES
            rotary_phase(counter, step, model, layer)
            counter += COUNTER_BYTES
            attention_phase(counter, step, model, layer, scratch)
            counter += COUNTER_BYTES
            if index == model[NUM_LAYERS] - 1:
                rows = step[WANTED]
                if rows == 0:
                    return
                gather_phase(counter, step, model)
                counter += COUNTER_BYTES
                x, attended = step[X_WANTED], step[ATTENDED_WANTED]
            output = load_int(layer + 8 * OUTPUT)
            product_phase(counter, step, rows, hidden // LANES, attended, q_size, output, step[DELTA], 0)
            counter += COUNTER_BYTES
            norm = load_int(layer + 8 * POST_NORM)
            norm_phase(counter, model, rows, x, step[DELTA], norm, step[NORMED], 1)
            counter += COUNTER_BYTES
            gate_up = load_int(layer + 8 * GATE_UP)
            product_phase(
                counter, step, rows, 2 * intermediate // LANES, step[NORMED], hidden, gate_up, step[GATE_UP_OUT],
                step[ACTIVATED],
            )  # fmt: skip
            counter += COUNTER_BYTES
            down = load_int(layer + 8 * DOWN)
            product_phase(counter, step, rows, hidden // LANES, step[ACTIVATED], intermediate, down, step[DELTA], 0)
            counter += COUNTER_BYTES
        norm_phase(counter, model, rows, x, step[DELTA], model[FINAL_NORM], step[NORMED], 1)
        counter += COUNTER_BYTES
        product_phase(counter, step, rows, model[VOCAB_PANELS], step[NORMED], hidden, model[HEAD], step[LOGITS], 0)

    @njit(nogil=True, error_model="numpy")
    def enter(step):  # type: ignore[no-untyped-def]
        table = carray(step, (STEP_SIZE,), types.int64)
        run(table, carray(as_pointer(table[MODEL]), (MODEL_SIZE,), types.int64))

    return cfunc(types.void(types.voidptr), nopython=True, cache=True, error_model="numpy")(enter.py_func)
