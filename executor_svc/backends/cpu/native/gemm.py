"""Matrix products by register tiles: y[rows, 16 panels] = x w, one fused multiply-add chain per element, k ascending.

A *panel* is 16 output columns for all k, contiguous: [K][16]. Packed weights are panels one after another
([N / 16][K][16]); a page of keys is a panel of 16 tokens ([head_dim][16]); a page of values is head_dim / 16
interleaved ones. The same tiles serve all three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
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


def _tile(rows: int, panels: int, element: ir.Type, scaled: bool) -> Any:
    """A kernel of fixed rows and panels. Arguments, in bytes except K: x, x row stride, w, w step of k, w step of
    panels, K, y, y row stride, scale (float32 [rows]; when ``scaled`` the product is added to y * scale)."""

    @kernel(9)
    def tile(
        e: Emitter,
        x: Any,
        x_stride: Any,
        w: Any,
        k_step: Any,
        panel_step: Any,
        k: Any,
        y: Any,
        y_stride: Any,
        scale: Any,
    ) -> None:
        x_rows = [e.at(x, e.b.mul(x_stride, I64(r))) for r in range(rows)]
        y_tiles = [
            [e.at(e.at(y, e.b.mul(y_stride, I64(r))), 4 * LANES * p) for p in range(panels)] for r in range(rows)
        ]
        panel_at = [e.at(w, e.b.mul(panel_step, I64(p))) for p in range(panels)]
        initial = []
        for r in range(rows):
            if scaled:
                factor = e.broadcast(e.load_scalar(e.at(scale, 4 * r)))
                initial += [e.b.fmul(e.load(address), factor) for address in y_tiles[r]]
            else:
                initial += [e.constant(0.0)] * panels

        def step(index: Any, sums: list[Any]) -> list[Any]:
            offset = e.b.mul(index, k_step)
            weights = [e.load(e.at(address, offset), element) for address in panel_at]
            x_offset = e.b.mul(index, I64(4))
            out = []
            for r in range(rows):
                value = e.broadcast(e.load_scalar(e.at(x_rows[r], x_offset)))
                out += [e.fma(value, weights[p], sums[r * panels + p]) for p in range(panels)]
            return out

        sums = e.loop(k, initial, step)
        for r in range(rows):
            for p in range(panels):
                e.store(sums[r * panels + p], y_tiles[r][p])

    return tile


def make_block(dtype: str, scaled: bool, tiles: dict[int, int]) -> Any:
    """A compiled function ``block(rows, panels, <arguments of a tile>)`` for any rows and panels."""
    arguments = ("x", "x_stride", "w", "k_step", "panel_step", "k", "y", "y_stride", "scale")
    steps = {"x": "x_stride", "y": "y_stride", "scale": "4"}
    return join_tiles(tiles, lambda rows, panels: _tile(rows, panels, ELEMENT[dtype], scaled), arguments, steps)


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
