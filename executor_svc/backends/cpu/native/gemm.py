"""Matrix products by register tiles: y[rows, 16 panels] = x w, one fused multiply-add chain per element, k ascending.

A *panel* is 16 output columns for all k, contiguous: [K][16]. Packed weights are panels one after another
([N / 16][K][16]). The parts that the tiles of attention have too are functions of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numba import njit

from executor_svc.backends.cpu.native.vector import F16, F32, I64, LANES, Emitter, kernel

BYTES = {"float16": 2, "float32": 4}
ELEMENT = {"float16": F16, "float32": F32}

# Rows x panels that fit the vector registers: 32 of 16 lanes (AVX-512), or 16 of 8 lanes (AVX2).
TILES_AVX512 = dict.fromkeys(range(1, 13), 2)
TILES_AVX2 = {1: 4, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}


def pack_panels(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    """[N, K] -> [ceil(N / 16), K, 16] float16 or float32, missing columns zero."""
    n, k = weight.shape
    missing = -n % LANES
    if missing:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    kind = torch.float16 if dtype == "float16" else torch.float32
    return weight.to(kind).view(-1, LANES, k).transpose(1, 2).contiguous()


def row_addresses(e: Emitter, start: Any, stride: Any, rows: int) -> list[Any]:
    return [e.at(start, e.b.mul(stride, I64(r))) for r in range(rows)]


def add_products(e: Emitter, x_rows: list[Any], x_offset: Any, columns: list[Any], sums: list[Any]) -> list[Any]:
    """The sums, row by row, plus the scalar of each row times each of the vectors ``columns``."""
    out = []
    for r, row in enumerate(x_rows):
        value = e.broadcast(e.load_scalar(e.at(row, x_offset)))
        out += [e.fma(value, column, sums[r * len(columns) + p]) for p, column in enumerate(columns)]
    return out


def store_rows(e: Emitter, sums: list[Any], y_rows: list[Any]) -> None:
    panels = len(sums) // len(y_rows)
    for i, total in enumerate(sums):
        e.store(total, e.at(y_rows[i // panels], 4 * LANES * (i % panels)))


def _tile(rows: int, panels: int, dtype: str) -> Any:
    """A kernel of fixed rows and panels. Strides and the step from one panel to the next in bytes."""

    @kernel(7)
    def tile(e: Emitter, x: Any, x_stride: Any, w: Any, panel_step: Any, k: Any, y: Any, y_stride: Any) -> None:
        x_rows, panel_at = row_addresses(e, x, x_stride, rows), row_addresses(e, w, panel_step, panels)

        def step(index: Any, sums: list[Any]) -> list[Any]:
            offset = e.b.mul(index, I64(BYTES[dtype] * LANES))
            weights = [e.load(e.at(address, offset), ELEMENT[dtype]) for address in panel_at]
            return add_products(e, x_rows, e.b.mul(index, I64(4)), weights, sums)

        sums = e.loop(k, [e.constant(0.0)] * (rows * panels), step)
        store_rows(e, sums, row_addresses(e, y, y_stride, rows))

    return tile


def make_block(dtype: str, tiles: dict[int, int]) -> Any:
    """A compiled function ``block(rows, panels, <arguments of a tile>)`` for any rows and panels."""
    arguments = ("x", "x_stride", "w", "panel_step", "k", "y", "y_stride")
    steps = {"x": "x_stride", "y": "y_stride"}
    return join_tiles(tiles, lambda rows, panels: _tile(rows, panels, dtype), arguments, steps)


def join_tiles(
    tiles: dict[int, int], make_tile: Callable[[int, int], Any], arguments: Sequence[str], steps: dict[str, str]
) -> Any:
    """``block(rows, panels, *arguments)``: rows split into register tiles of nearly equal height.

    ``tiles``: rows -> panels of one register tile; ``make_tile(rows, panels)`` takes ``arguments``, among them ``w``
    with ``panel_step`` and ``y``; ``steps``: argument -> bytes from one row to the next.
    """
    scope: dict[str, Any] = {}
    most = max(tiles)
    by_row = ", ".join(f"{name} + row * {steps[name]}" if name in steps else name for name in arguments)
    lines = [
        f"def block(rows, panels, {', '.join(arguments)}):",
        "    row = 0",
        "    while row < rows:",
        f"        count = (rows - row + {most - 1}) // {most}",
        "        height = (rows - row + count - 1) // count",
        f"        by_height(height, panels, {by_row})",
        "        row += height",
    ]
    inner = [f"def by_height(height, panels, {', '.join(arguments)}):", "    p = 0"]
    moved = {"w": "w + p * panel_step", "y": f"y + p * {4 * LANES}"}
    by_panel = ", ".join(moved.get(name, name) for name in arguments)
    for rows, width in tiles.items():
        inner.append(f"    {'if' if rows == 1 else 'elif'} height == {rows}:")
        for panels in sorted({width, 1}, reverse=True):
            scope[f"tile_{rows}_{panels}"] = make_tile(rows, panels)
            inner.append(f"        while p + {panels} <= panels:")
            inner.append(f"            tile_{rows}_{panels}({by_panel})")
            inner.append(f"            p += {panels}")
    compiled = njit(nogil=True, error_model="numpy")
    exec("\n".join(inner), scope)
    scope["by_height"] = compiled(scope["by_height"])
    exec("\n".join(lines), scope)
    return compiled(scope["block"])
