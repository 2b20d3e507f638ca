"""The phases that work on one row at a time, a few rows an item: norms, rotary embedding, gathering, softcap."""

from __future__ import annotations

from typing import Any

from numba import njit

from executor_svc.backends.cpu.native.attention import make_pages
from executor_svc.backends.cpu.native.layout import (
    ATTENDED,
    ATTENDED_WANTED,
    BEFORE_LOGIT_CAP,
    EPSILON,
    FLOATS,
    HEAD_DIM,
    HIDDEN,
    INVERSE_HEAD,
    INVERSE_HIDDEN,
    K_NORM,
    KEYS,
    KV_HEADS,
    KV_SIZE,
    KV_SLOTS,
    LOGIT_CAP,
    LOGITS,
    POSITIONS,
    Q_NORM,
    Q_SIZE,
    QKV_BIAS,
    QKV_OUT,
    ROPE,
    ROTARY_DIM,
    TOKENS,
    VALUES,
    VOCAB_PANELS,
    WANTED,
    WANTED_INDICES,
    X_WANTED,
    X,
)  # fmt: skip
from executor_svc.backends.cpu.native.phases import finish, take
from executor_svc.backends.cpu.native.rows import add_norm_row, add_row, copy_row, rotate_head, softcap_row
from executor_svc.backends.cpu.native.vector import LANES, load_float, load_int

ROWS_PER_ITEM = 4
LOGIT_PANELS = 64  # panels of one softcap item


@njit(nogil=True, error_model="numpy")
def norm_phase(counter, model, rows, x, delta, bias, delta_norm, weight, out, add):  # type: ignore[no-untyped-def]
    """x += delta (where ``add``), out = norm(x), for [rows, hidden] each. ``bias`` (of the product that gave delta)
    and ``delta_norm`` (sandwich norms): addresses, or 0."""
    hidden, vectors, done = model[HIDDEN], model[HIDDEN] // LANES, 0
    items = (rows + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM
    inverse, epsilon = load_float(model[FLOATS] + 4 * INVERSE_HIDDEN), load_float(model[FLOATS] + 4 * EPSILON)
    while True:
        item = take(counter, items)
        if item == items:
            break
        for row in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, rows)):
            at = row * hidden * 4
            change = delta + at
            if bias != 0:
                add_row(change, bias, vectors)
            if delta_norm != 0:
                add_norm_row(change, change, delta_norm, change, vectors, 0, inverse, epsilon)
            add_norm_row(x + at, change, weight, out + at, vectors, add, inverse, epsilon)
        done += 1
    finish(counter, done, items)


def make_rotary_phase(kv_type: str) -> Any:
    """A compiled ``rotary_phase(counter, step, model, layer)``; ``kv_type``: the cache's element type."""
    _, write_kv = make_pages(kv_type)

    @njit(nogil=True, error_model="numpy")
    def rotary_phase(counter, step, model, layer):  # type: ignore[no-untyped-def]
        """Biases, norms and rotation of q, k and v in place; k and v into the cache."""
        size, rotated, heads = model[HEAD_DIM], model[ROTARY_DIM], model[KV_HEADS]
        q_size, kv_size, done = model[Q_SIZE], model[KV_SIZE], 0
        width = q_size + 2 * kv_size
        items = (step[TOKENS] + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM
        keys, values, rope = load_int(layer + 8 * KEYS), load_int(layer + 8 * VALUES), load_int(layer + 8 * ROPE)
        bias, q_norm, k_norm = (
            load_int(layer + 8 * QKV_BIAS),
            load_int(layer + 8 * Q_NORM),
            load_int(layer + 8 * K_NORM),
        )
        inverse, epsilon = load_float(model[FLOATS] + 4 * INVERSE_HEAD), load_float(model[FLOATS] + 4 * EPSILON)
        while True:
            item = take(counter, items)
            if item == items:
                break
            for token in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, step[TOKENS])):
                row = step[QKV_OUT] + token * width * 4
                table = rope + load_int(step[POSITIONS] + 8 * token) * rotated * 4
                if bias != 0:
                    add_row(row, bias, width // LANES)
                for i in range((q_size + kv_size) // size):
                    head = row + i * size * 4
                    if q_norm != 0:
                        norm = q_norm if i < q_size // size else k_norm
                        add_norm_row(head, head, norm, head, size // LANES, 0, inverse, epsilon)
                    rotate_head(head, table, rotated // 2)
                slot = load_int(step[KV_SLOTS] + 8 * token)
                write_kv(row + q_size * 4, row + (q_size + kv_size) * 4, keys, values, slot, heads, size)
            done += 1
        finish(counter, done, items)

    return rotary_phase


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


@njit(nogil=True, error_model="numpy")
def softcap_phase(counter, step, model):  # type: ignore[no-untyped-def]
    """The logits, capped in place."""
    panels, done = step[WANTED] * model[VOCAB_PANELS], 0
    items = (panels + LOGIT_PANELS - 1) // LOGIT_PANELS
    before, cap = load_float(model[FLOATS] + 4 * BEFORE_LOGIT_CAP), load_float(model[FLOATS] + 4 * LOGIT_CAP)
    while True:
        item = take(counter, items)
        if item == items:
            break
        first = item * LOGIT_PANELS
        softcap_row(step[LOGITS] + first * LANES * 4, min(LOGIT_PANELS, panels - first), before, cap)
        done += 1
    finish(counter, done, items)
