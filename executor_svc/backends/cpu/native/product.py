"""The product phase: activations times one packed weight matrix, split into items over rows and panels."""

from __future__ import annotations

from typing import Any

from numba import njit

from executor_svc.backends.cpu.native.gemm import BYTES, make_block
from executor_svc.backends.cpu.native.layout import FLOATS, GATE_CUBIC, GATE_LINEAR, MODEL
from executor_svc.backends.cpu.native.phases import finish, take
from executor_svc.backends.cpu.native.rows import add_row, gate_mul_row
from executor_svc.backends.cpu.native.vector import LANES, load_float, load_int

ROW_BLOCK = 96  # rows of one item: their inputs stay in the second-level cache


def make_product_phase(weights: str, tiles: dict[int, int]) -> Any:
    """A compiled ``product_phase(counter, step, rows, panels, x, k, w, y, activated, bias)`` for one weight type.

    y float32 [rows, 16 panels] = x float32 [rows, k] w; with ``activated`` (an address, else 0) also the activation of
    its (gate, up) panels, float32 [rows, 8 panels], to which ``bias`` (an address, or 0) is added before.
    ``w``: ``pack_panels``; ``tiles``: as for ``make_block``.
    """
    product = make_block(weights, False, tiles)
    element = BYTES[weights]

    @njit(nogil=True, error_model="numpy")
    def product_phase(counter, step, rows, panels, x, k, w, y, activated, bias):  # type: ignore[no-untyped-def]
        floats = load_int(step[MODEL] + 8 * FLOATS)
        linear, cubic = load_float(floats + 4 * GATE_LINEAR), load_float(floats + 4 * GATE_CUBIC)
        width = 4 if panels < 512 else 16  # panels of one item
        across = (panels + width - 1) // width
        items = (rows + ROW_BLOCK - 1) // ROW_BLOCK * across
        panel_bytes, done = k * LANES * element, 0
        while True:
            item = take(counter, items)
            if item == items:
                break
            row, panel = item // across * ROW_BLOCK, item % across * width
            height, count = min(ROW_BLOCK, rows - row), min(width, panels - panel)
            target = y + (row * panels + panel) * LANES * 4
            product(
                height, count, x + row * k * 4, k * 4, w + panel * panel_bytes, LANES * element, panel_bytes, k,
                target, panels * LANES * 4, 0,
            )  # fmt: skip
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
