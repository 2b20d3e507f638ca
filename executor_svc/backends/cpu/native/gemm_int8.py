"""Products of int8 weights and int8 activations by register tiles: exact int32 sums, then one scale chain an element.

::

    y[row, column] = float(sum_k q_x[row, k] * q_w[column, k]) * scale_w[column] * scale_x[row]

Weights are symmetric per output column, activations per row (``quantize``). Sums are exact, so no instruction set,
tile or split changes any bit. Instruction sets differ in how many k one instruction takes (``Method.group``), and the
panels and activations are laid out for the one at hand:

- ``vnni`` multiplies 4 unsigned by 4 signed bytes: activations are stored plus 128, and the sums start at
  -128 * (sum of the column's weights);
- ``madd`` multiplies 2 pairs of signed 16-bit numbers, which cannot saturate, unlike AVX2's products of bytes;
- ``plain`` is for other machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import torch

from executor_svc.backends.cpu.native.gemm import TILES_AVX2, TILES_AVX512, join_tiles
from executor_svc.backends.cpu.native.vector import I32, I64, LANES, VECTOR, Emitter, kernel
from executor_svc.backends.cpu.quantize import LIMIT, quantize_rows

I8, I16 = ir.IntType(8), ir.IntType(16)
HEADER = 8 * LANES  # bytes in front of a panel: float32 scales [16], int32 first sums [16]
MOST_K = (2**31 - 1) // (255 * LIMIT)  # terms whose sum surely fits int32


@dataclass(slots=True, frozen=True)
class Method:
    """``lanes`` int32 sums to a register, ``group`` consecutive k to an instruction, ``x_bytes`` to an activation."""

    kind: str
    lanes: int
    group: int
    x_bytes: int
    tiles: tuple[tuple[int, int], ...]  # rows, panels of one register tile


def _method(kind: str, lanes: int, group: int, x_bytes: int, tiles: dict[int, int]) -> Method:
    return Method(kind, lanes, group, x_bytes, tuple(tiles.items()))


VNNI_512 = _method("vnni", 16, 4, 1, TILES_AVX512 | {1: 4, 2: 4})
VNNI_256 = _method("vnni", 8, 4, 1, TILES_AVX2)
MADD = _method("madd", 8, 2, 2, TILES_AVX2)
PLAIN = _method("plain", 16, 2, 2, TILES_AVX2)


def host_method() -> Method:
    """The fastest that this CPU can run."""
    has: Callable[[str], bool] = llvm.get_host_cpu_features().get
    if has("avx512vnni") and has("avx512bw"):
        return VNNI_512
    if has("avxvnni") or (has("avx512vnni") and has("avx512vl")):
        return VNNI_256
    return MADD if has("avx2") else PLAIN


def panel_bytes(k: int) -> int:
    return HEADER + LANES * k


def pack_panels_int8(weight: torch.Tensor, method: Method) -> torch.Tensor:
    """[N, K] of any float type -> uint8 [ceil(N / 16), ``panel_bytes(K)``]: header, then int8 [K / group, 16, group].

    Missing columns are zero. ``ValueError`` unless K is a multiple of 16 and its sums fit int32.
    """
    n, k = weight.shape
    if k % LANES or k > MOST_K:
        raise ValueError(f"int8 weights of {k} inputs: must be a multiple of {LANES}, at most {MOST_K}")
    values, scales = quantize_rows(weight.float())
    missing = -n % LANES
    values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    scales = torch.nn.functional.pad(scales, (0, missing)).view(-1, LANES)
    first = values.sum(dim=1, dtype=torch.int32).view(-1, LANES) * (-128 if method.kind == "vnni" else 0)
    grouped = values.view(-1, LANES, k // method.group, method.group).transpose(1, 2).contiguous()
    parts = (scales.contiguous().view(torch.uint8), first.to(torch.int32).view(torch.uint8))
    return torch.cat([*parts, grouped.view(len(grouped), -1).view(torch.uint8)], dim=1)


def make_block_int8(method: Method) -> Any:
    """A compiled ``block(rows, panels, x, x_stride, w, panel_step, k, y, y_stride, scales)`` for any rows and panels.

    ``x``: what ``quantize.make_quantize_row`` writes; ``w``: ``pack_panels_int8``; ``scales``: float32 [rows];
    strides and steps in bytes. Writes y float32 [rows, 16 panels].
    """
    arguments = ("x", "x_stride", "w", "panel_step", "k", "y", "y_stride", "scales")
    steps = {"x": "x_stride", "y": "y_stride", "scales": "4"}
    return join_tiles(dict(method.tiles), lambda rows, panels: _tile(rows, panels, method), arguments, steps)


def _tile(rows: int, panels: int, method: Method) -> Any:
    """A kernel of fixed rows and panels."""
    parts = LANES // method.lanes  # registers of one panel's sums
    kind = ir.VectorType(I32, method.lanes)
    unroll = max(1, min(LANES // method.group, 8 // (rows * parts)))
    multiply_add = _STEPS[method.kind]

    @kernel(8)
    def tile(
        e: Emitter, x: Any, x_stride: Any, w: Any, panel_step: Any, k: Any, y: Any, y_stride: Any, scales: Any
    ) -> None:
        x_rows = [e.at(x, e.b.mul(x_stride, I64(r))) for r in range(rows)]
        panel_at = [e.at(w, e.b.mul(panel_step, I64(p))) for p in range(panels)]
        first = [
            [_load(e, kind, e.at(address, 4 * LANES + 4 * method.lanes * part)) for part in range(parts)]
            for address in panel_at
        ]

        def step(index: Any, sums: list[Any]) -> list[Any]:
            for u in range(unroll):
                group = e.b.add(e.b.mul(index, I64(unroll)), I64(u))
                w_offset = e.at(e.b.mul(group, I64(LANES * method.group)), HEADER)
                weights = [
                    [
                        _load(
                            e,
                            ir.VectorType(I8, method.lanes * method.group),
                            e.at(e.at(address, w_offset), method.lanes * method.group * part),
                        )
                        for part in range(parts)
                    ]
                    for address in panel_at
                ]
                x_offset = e.b.mul(group, I64(method.group * method.x_bytes))
                out = []
                for r in range(rows):
                    pattern = _broadcast(e, _load(e, I32, e.at(x_rows[r], x_offset)), method.lanes)
                    for p in range(panels):
                        for part in range(parts):
                            total = sums[(r * panels + p) * parts + part]
                            out.append(multiply_add(e, method, total, pattern, weights[p][part]))
                sums = out
            return sums

        count = e.b.udiv(k, I64(method.group * unroll))
        sums = e.loop(count, [s for _ in range(rows) for panel in first for s in panel], step)
        for r in range(rows):
            row_scale = e.broadcast(e.load_scalar(e.at(scales, 4 * r)))
            for p in range(panels):
                at = (r * panels + p) * parts
                total = sums[at] if parts == 1 else _concatenate(e, sums[at], sums[at + 1])
                value = e.b.fmul(e.b.fmul(e.b.sitofp(total, VECTOR), e.load(panel_at[p])), row_scale)
                e.store(value, e.at(e.at(y, e.b.mul(y_stride, I64(r))), 4 * LANES * p))

    return tile


def _vnni(e: Emitter, method: Method, total: Any, pattern: Any, weights: Any) -> Any:
    kind, int_kind = weights.type, total.type
    name = f"llvm.x86.avx512.vpdpbusd.{32 * method.lanes}"
    return _call(e, name, int_kind, total, e.b.bitcast(pattern, kind), weights)


def _madd(e: Emitter, method: Method, total: Any, pattern: Any, weights: Any) -> Any:
    wide = ir.VectorType(I16, 2 * method.lanes)
    products = _call(e, "llvm.x86.avx2.pmadd.wd", total.type, e.b.bitcast(pattern, wide), e.b.sext(weights, wide))
    return e.b.add(total, products)


def _plain(e: Emitter, method: Method, total: Any, pattern: Any, weights: Any) -> Any:
    x = e.b.bitcast(pattern, ir.VectorType(I16, 2 * method.lanes))
    for half in range(2):
        chosen = ir.Constant(ir.VectorType(I32, method.lanes), list(range(half, 2 * method.lanes, 2)))
        a, b = (e.b.sext(e.b.shuffle_vector(v, v, chosen), total.type) for v in (x, weights))
        total = e.b.add(total, e.b.mul(a, b))
    return total


_STEPS = {"vnni": _vnni, "madd": _madd, "plain": _plain}


def _load(e: Emitter, kind: ir.Type, address: Any) -> Any:
    value = e.b.load(e.b.inttoptr(address, kind.as_pointer()))
    value.align = 4 if kind is I32 else 1
    return value


def _broadcast(e: Emitter, scalar: Any, lanes: int) -> Any:
    kind = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    one = e.b.insert_element(undefined, scalar, I32(0))
    return e.b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _concatenate(e: Emitter, low: Any, high: Any) -> Any:
    return e.b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, LANES), list(range(LANES))))


def _call(e: Emitter, name: str, kind: ir.Type, *arguments: Any) -> Any:
    module = e.b.module
    function = module.globals.get(name) or ir.Function(
        module, ir.FunctionType(kind, [argument.type for argument in arguments]), name
    )
    return e.b.call(function, arguments)
