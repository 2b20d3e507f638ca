"""The product phase: activations times one packed weight matrix, split into items over rows and panels.

With int8 weights it begins with a phase of its own that quantises the activations, each row once.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from executor_svc.backends.cpu.native.gemm import BYTES, TILES_AVX2, TILES_AVX512, make_block
from executor_svc.backends.cpu.native.gemm_int8 import (
    Method,
    host_method,
    make_block_int8,
    panel_bytes,
    row_bytes,
)
from executor_svc.backends.cpu.native.layout import (
    BLOCK_ENTRY,
    FLOATS,
    GATE_CUBIC,
    GATE_LINEAR,
    MODEL,
    NUM_EXPERTS,
    PRELUDE_OFFSET,
    QUANTIZED,
    ROW_BLOCK,
)
from executor_svc.backends.cpu.native.phases import finish, take
from executor_svc.backends.cpu.native.quantize import make_quantize_row
from executor_svc.backends.cpu.native.rows import add_row, gate_mul_row
from executor_svc.backends.cpu.native.vector import LANES, load_float, load_int
from executor_svc.backends.cpu.quantize import group_size

ROWS_PER_ITEM = 4  # rows of one item of quantising


@njit(nogil=True, error_model="numpy")
def most_blocks(experts, rows):  # type: ignore[no-untyped-def]
    """How many blocks ``rows`` rows can make that go to ``experts`` experts. The number of a phase's items must not
    depend on where they go: a thread that comes late would count those of another layer."""
    return min(rows, experts + rows // ROW_BLOCK)


def make_product_phase(weights: str, avx512: bool) -> Any:
    """A compiled ``product_phase(counter, step, rows, panels, x, k, w, y, activated, bias, blocks, w_step)``.

    y float32 [rows, 16 panels] = x float32 [rows, k] w; with ``activated`` (an address, else 0) also the activation of
    its (gate, up) panels, float32 [rows, 8 panels], to which ``bias`` (an address, or 0) is added before.
    ``blocks``: 0, or the address of a table of blocks (see ``layout``), each of which has a matrix of its own,
    expert * ``w_step`` bytes after ``w``. ``w``: ``pack_panels`` or ``pack_panels_int8``.
    """
    if weights == "int8":
        prepare, multiply = _int8(host_method())
    else:
        prepare, multiply = _floats(weights, TILES_AVX512 if avx512 else TILES_AVX2)

    @njit(nogil=True, error_model="numpy")
    def product_phase(counter, step, rows, panels, x, k, w, y, activated, bias, blocks, w_step):  # type: ignore[no-untyped-def]
        prepare(counter + PRELUDE_OFFSET, step, rows, x, k)
        floats = load_int(step[MODEL] + 8 * FLOATS)
        linear, cubic = load_float(floats + 4 * GATE_LINEAR), load_float(floats + 4 * GATE_CUBIC)
        width = 4 if panels < 512 else 16  # panels of one item
        across = (panels + width - 1) // width
        items, done = (rows + ROW_BLOCK - 1) // ROW_BLOCK * across, 0
        if blocks != 0:
            items = most_blocks(load_int(step[MODEL] + 8 * NUM_EXPERTS), rows) * across
        while True:
            item = take(counter, items)
            if item == items:
                break
            row, panel = item // across * ROW_BLOCK, item % across * width
            height, count, matrix = min(ROW_BLOCK, rows - row), min(width, panels - panel), w
            if blocks != 0:
                block = blocks + item // across * BLOCK_ENTRY * 8
                matrix += load_int(block) * w_step
                row, height = load_int(block + 8), load_int(block + 16)
            target = y + (row * panels + panel) * LANES * 4
            multiply(step, row, height, panel, count, x, k, matrix, target, panels * LANES * 4)
            if activated != 0:
                for r in range(height):
                    gate_up = target + r * panels * LANES * 4
                    if bias != 0:
                        add_row(gate_up, bias + panel * LANES * 4, count)
                    out = activated + ((row + r) * (panels // 2) + panel // 2) * LANES * 4
                    gate_mul_row(gate_up, out, count // 2, linear, cubic)
            done += 1
        finish(counter, done, items)

    return product_phase


def _floats(weights: str, tiles: dict[int, int]) -> tuple[Any, Any]:
    block = make_block(weights, tiles)
    element = BYTES[weights]

    @njit(nogil=True, error_model="numpy")
    def prepare(counter, step, rows, x, k):  # type: ignore[no-untyped-def]
        pass

    @njit(nogil=True, error_model="numpy")
    def multiply(step, row, rows, panel, panels, x, k, w, y, y_stride):  # type: ignore[no-untyped-def]
        size = k * LANES * element
        block(rows, panels, x + row * k * 4, k * 4, w + panel * size, size, k, y, y_stride)

    return prepare, multiply


def _int8(method: Method) -> tuple[Any, Any]:
    block, quantize_row, x_bytes = make_block_int8(method), make_quantize_row(method), method.x_bytes
    group_of, row_size, panel_size = (
        njit(nogil=True, error_model="numpy")(function) for function in (group_size, row_bytes, panel_bytes)
    )

    @njit(nogil=True, error_model="numpy")
    def prepare(counter, step, rows, x, k):  # type: ignore[no-untyped-def]
        items, done, group = (rows + ROWS_PER_ITEM - 1) // ROWS_PER_ITEM, 0, group_of(k)
        stride = row_size(k, group, x_bytes)
        while True:
            item = take(counter, items)
            if item == items:
                break
            for row in range(item * ROWS_PER_ITEM, min((item + 1) * ROWS_PER_ITEM, rows)):
                quantize_row(x + row * k * 4, step[QUANTIZED] + row * stride, k, group)
            done += 1
        finish(counter, done, items)

    @njit(nogil=True, error_model="numpy")
    def multiply(step, row, rows, panel, panels, x, k, w, y, y_stride):  # type: ignore[no-untyped-def]
        group = group_of(k)
        size, stride = panel_size(k, group), row_size(k, group, x_bytes)
        block(
            rows, panels, step[QUANTIZED] + row * stride, stride, w + panel * size, size, k, group, y, y_stride
        )  # fmt: skip

    return prepare, multiply
