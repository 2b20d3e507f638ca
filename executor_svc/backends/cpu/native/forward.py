"""The compiled forward: every phase of every layer, run by each thread of the team from top to bottom."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import carray, cfunc, njit, types

from executor_svc.backends.cpu.native.attention import make_attend_item
from executor_svc.backends.cpu.native.experts import combine_phase, route_phase, sort_phase, spread_phase
from executor_svc.backends.cpu.native.layout import (
    ACTIVATED,
    ATTENDED,
    ATTENDED_WANTED,
    ATTENTION_OUT_NORM,
    COUNTER_BYTES,
    COUNTERS,
    CYCLES_OFFSET,
    DELTA,
    DOWN,
    DOWN_BIAS,
    EXPERT_BLOCKS,
    EXPERT_DOWN_BYTES,
    EXPERT_GATE_UP_BYTES,
    EXPERT_IN,
    EXPERT_INTERMEDIATE,
    EXPERT_OUT,
    EXPERTS_PER_TOKEN,
    FINAL_NORM,
    FLOATS,
    GATE_UP,
    GATE_UP_BIAS,
    GATE_UP_OUT,
    HEAD,
    HIDDEN,
    INPUT_NORM,
    INTERMEDIATE,
    KV_HEADS,
    KV_SIZE,
    LAYER_SIZE,
    LAYERS,
    LOGIT_CAP,
    LOGITS,
    MLP_OUT_NORM,
    MODEL,
    MODEL_SIZE,
    NORMED,
    NUM_ITEMS,
    NUM_LAYERS,
    OUTPUT,
    OUTPUT_BIAS,
    POST_NORM,
    Q_SIZE,
    QKV,
    QKV_OUT,
    ROUTER,
    SCRATCH,
    SCRATCH_BYTES,
    STEP_SIZE,
    TOKENS,
    VOCAB_PANELS,
    WANTED,
    X_WANTED,
    X,
)  # fmt: skip
from executor_svc.backends.cpu.native.phases import finish, take
from executor_svc.backends.cpu.native.product import make_product_phase
from executor_svc.backends.cpu.native.row_phases import gather_phase, make_rotary_phase, norm_phase, softcap_phase
from executor_svc.backends.cpu.native.vector import LANES, as_pointer, atomic_add, load_float, load_int, store_cycles


@cache
def make_forward(weights: str, kv_type: str, avx512: bool) -> Any:
    """The compiled entry point, ``void(step table)``, for a weight and a KV type; every thread of a team calls it.

    AVX-512 and AVX2 differ in register tiles only, which do not change any result.
    """
    product_phase = make_product_phase(weights, avx512)
    attend_item = make_attend_item(kv_type, avx512)
    rotary_phase = make_rotary_phase(kv_type)

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
        bias, delta_norm = 0, 0  # of the last layer's MLP
        for index in range(model[NUM_LAYERS]):
            layer = model[LAYERS] + index * LAYER_SIZE * 8
            norm = load_int(layer + 8 * INPUT_NORM)
            norm_phase(counter, model, rows, x, step[DELTA], bias, delta_norm, norm, step[NORMED], min(index, 1))
            counter += COUNTER_BYTES
            qkv = load_int(layer + 8 * QKV)
            product_phase(counter, step, rows, qkv_panels, step[NORMED], hidden, qkv, step[QKV_OUT], 0, 0, 0, 0)
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
            product_phase(counter, step, rows, hidden // LANES, attended, q_size, output, step[DELTA], 0, 0, 0, 0)
            counter += COUNTER_BYTES
            bias, delta_norm = load_int(layer + 8 * OUTPUT_BIAS), load_int(layer + 8 * ATTENTION_OUT_NORM)
            norm = load_int(layer + 8 * POST_NORM)
            norm_phase(counter, model, rows, x, step[DELTA], bias, delta_norm, norm, step[NORMED], 1)
            counter += COUNTER_BYTES
            # A plain MLP, or experts: the same two products over other rows, with a matrix for each block of them.
            mlp_rows, mlp_x, mlp_y, inner, blocks = rows, step[NORMED], step[DELTA], intermediate, 0
            if load_int(layer + 8 * ROUTER) != 0:
                route_phase(counter, step, model, layer, rows, scratch)
                counter += COUNTER_BYTES
                sort_phase(counter, step, model, rows)
                counter += COUNTER_BYTES
                spread_phase(counter, step, model, rows)
                counter += COUNTER_BYTES
                mlp_rows, mlp_x, mlp_y = rows * model[EXPERTS_PER_TOKEN], step[EXPERT_IN], step[EXPERT_OUT]
                inner, blocks = model[EXPERT_INTERMEDIATE], step[EXPERT_BLOCKS]
            gate_up, down = load_int(layer + 8 * GATE_UP), load_int(layer + 8 * DOWN)
            product_phase(
                counter, step, mlp_rows, 2 * inner // LANES, mlp_x, hidden, gate_up, step[GATE_UP_OUT],
                step[ACTIVATED], load_int(layer + 8 * GATE_UP_BIAS), blocks, model[EXPERT_GATE_UP_BYTES],
            )  # fmt: skip
            counter += COUNTER_BYTES
            product_phase(
                counter, step, mlp_rows, hidden // LANES, step[ACTIVATED], inner, down, mlp_y, 0, 0, blocks,
                model[EXPERT_DOWN_BYTES],
            )  # fmt: skip
            counter += COUNTER_BYTES
            if blocks != 0:
                combine_phase(counter, step, model, rows)
                counter += COUNTER_BYTES
            bias, delta_norm = load_int(layer + 8 * DOWN_BIAS), load_int(layer + 8 * MLP_OUT_NORM)
        norm_phase(counter, model, rows, x, step[DELTA], bias, delta_norm, model[FINAL_NORM], step[NORMED], 1)
        counter += COUNTER_BYTES
        product_phase(
            counter, step, rows, model[VOCAB_PANELS], step[NORMED], hidden, model[HEAD], step[LOGITS], 0, 0, 0, 0
        )
        counter += COUNTER_BYTES
        if load_float(model[FLOATS] + 4 * LOGIT_CAP) != 0.0:
            softcap_phase(counter, step, model)

    @njit(nogil=True, error_model="numpy")
    def enter(step):  # type: ignore[no-untyped-def]
        table = carray(step, (STEP_SIZE,), types.int64)
        run(table, carray(as_pointer(table[MODEL]), (MODEL_SIZE,), types.int64))

    return cfunc(types.void(types.voidptr), nopython=True, error_model="numpy")(enter.py_func)
