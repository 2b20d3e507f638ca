"""The product phase: activations times one packed weight matrix, split into items over rows and panels."""

from __future__ import annotations

from typing import Any

from numba import njit

from executor_svc.backends.cpu.native.gemm import BYTES, make_block
from executor_svc.backends.cpu.native.phases import finish, take
from executor_svc.backends.cpu.native.rows import silu_mul_row
from executor_svc.backends.cpu.native.vector import LANES

ROW_BLOCK = 96  # rows of one item: their inputs stay in the second-level cache


def make_product_phase(weights: str, tiles: dict[int, int]) -> Any:
    """A compiled ``product_phase(counter, step, rows, panels, x, k, w, y, activated)`` for one weight type.

    y float32 [rows, 16 panels] = x float32 [rows, k] w; with ``activated`` (an address, else 0) also silu(gate) * up
    of its (gate, up) panels, float32 [rows, 8 panels]. ``w``: ``pack_panels``; ``tiles``: as for ``make_block``.
    """
    product = make_block(weights, False, tiles)
    element = BYTES[weights]

    @njit(nogil=True, error_model="numpy")
    def product_phase(counter, step, rows, panels, x, k, w, y, activated):  # type: ignore[no-untyped-def]
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
                    out = activated + ((row + r) * (panels // 2) + panel // 2) * LANES * 4
                    silu_mul_row(target + r * panels * LANES * 4, out, count // 2)
            done += 1
        finish(counter, done, items)

    return product_phase
