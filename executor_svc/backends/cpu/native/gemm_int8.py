"""Products of int8 weights and activations by register tiles: exact int32 sums of groups, one float chain over them.

::

    y[row, column] = sum over groups, ascending, of  float(sum_k q_x[row, k] * q_w[column, k]) * scale_w * scale_x

Weights have a scale for each column and group of k, activations for each row and group (``quantize``). The sums are
exact and the chain is fixed, so no instruction set, tile or split changes any bit. Instruction sets differ in how many
k one instruction takes (``Method.step``), and panels and activations are laid out for the one at hand:

- ``vnni`` multiplies 4 unsigned by 4 signed bytes: weights are stored plus 128, and a group's sum starts at
  -128 * (sum of the row's activations);
- ``madd`` multiplies 2 pairs of signed 16-bit numbers, which cannot saturate, unlike AVX2's products of bytes;
- ``plain`` is for other machines.

Weights: a panel is, for each group, float32 scales [16], then int8 [group / step, 16, step]. Activations: a row is int8
(int16 but for ``vnni``) [K], then float32 scales and int32 first sums, [K / group] each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import torch

from executor_svc.backends.cpu.native.gemm import TILES_AVX2, TILES_AVX512, join_tiles, row_addresses, store_rows
from executor_svc.backends.cpu.native.vector import I32, I64, LANES, VECTOR, Emitter, kernel
from executor_svc.backends.cpu.quantize import quantize_groups

I8, I16 = ir.IntType(8), ir.IntType(16)


@dataclass(slots=True, frozen=True)
class Method:
    """``lanes`` int32 sums to a register, ``step`` consecutive k to an instruction, ``x_bytes`` to an activation."""

    kind: str
    lanes: int
    step: int
    x_bytes: int
    tiles: dict[int, int] = field(hash=False)  # rows -> panels of one register tile


VNNI_512 = Method("vnni", 16, 4, 1, TILES_AVX512 | {1: 4, 2: 4})
VNNI_256 = Method("vnni", 8, 4, 1, TILES_AVX2)
MADD = Method("madd", 8, 2, 2, TILES_AVX2)
PLAIN = Method("plain", 16, 2, 2, TILES_AVX2)


def host_method() -> Method:
    """The fastest that this CPU can run."""
    has: Callable[[str], bool] = llvm.get_host_cpu_features().get
    if has("avx512vnni") and has("avx512bw"):
        return VNNI_512
    if has("avxvnni") or (has("avx512vnni") and has("avx512vl")):
        return VNNI_256
    return MADD if has("avx2") else PLAIN


def row_bytes(k: int, group: int, x_bytes: int) -> int:
    """Bytes of one row of activations; at most 3 k."""
    return k * x_bytes + k // group * 8


def panel_bytes(k: int, group: int) -> int:
    return k * LANES + k // group * 4 * LANES


def pack_panels_int8(weight: torch.Tensor, method: Method) -> torch.Tensor:
    """[N, K] of any float type -> uint8 [ceil(N / 16), ``panel_bytes``]; missing columns are zero."""
    values, scales = quantize_groups(weight.float())
    missing = -len(weight) % LANES
    values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, missing))
    scales = torch.nn.functional.pad(scales, (0, 0, 0, missing))
    panels, groups, size = len(values) // LANES, values.shape[1], values.shape[2]
    if method.kind == "vnni":
        values = values.view(torch.uint8) ^ 128  # plus 128
    grouped = values.view(panels, LANES, groups, size // method.step, method.step).permute(0, 2, 3, 1, 4)
    by_group = scales.view(panels, LANES, groups).transpose(1, 2).contiguous().view(torch.uint8)
    values = grouped.reshape(panels, groups, size * LANES).view(torch.uint8)
    return torch.cat([by_group, values], dim=2).view(panels, -1)


def make_block_int8(method: Method) -> Any:
    """A compiled ``block(rows, panels, x, x_stride, w, panel_step, k, group, y, y_stride)``, any rows and panels.

    ``x``: what ``native/quantize`` writes; ``w``: ``pack_panels_int8``; ``group``: ``group_size(k)``; strides and
    steps in bytes. Writes y float32 [rows, 16 panels].
    """
    arguments = ("x", "x_stride", "w", "panel_step", "k", "group", "y", "y_stride")
    steps = {"x": "x_stride", "y": "y_stride"}
    return join_tiles(method.tiles, lambda rows, panels: _tile(rows, panels, method), arguments, steps)


def _tile(rows: int, panels: int, method: Method) -> Any:
    """A kernel of fixed rows and panels."""
    parts = LANES // method.lanes  # registers of one panel's sums
    unroll = max(1, min(LANES // method.step, 8 // (rows * parts)))
    sum_kind, weight_kind = ir.VectorType(I32, method.lanes), ir.VectorType(I8, method.lanes * method.step)
    multiply_add, part_bytes = _STEPS[method.kind], method.lanes * method.step

    @kernel(8)
    def tile(
        e: Emitter, x: Any, x_stride: Any, w: Any, panel_step: Any, k: Any, group: Any, y: Any, y_stride: Any
    ) -> None:
        x_rows, panel_at = row_addresses(e, x, x_stride, rows), row_addresses(e, w, panel_step, panels)
        groups = e.b.udiv(k, group)
        scales_at = e.b.mul(k, I64(method.x_bytes))
        first_at = e.b.add(scales_at, e.b.mul(groups, I64(4)))
        group_bytes = e.b.mul(e.b.add(group, I64(4)), I64(LANES))
        count = e.b.udiv(group, I64(method.step * unroll))

        def one_group(index: Any, totals: list[Any]) -> list[Any]:
            w_group = e.b.mul(index, group_bytes)
            x_group = e.b.mul(e.b.mul(index, group), I64(method.x_bytes))
            scale_offset = e.b.mul(index, I64(4))

            def step(i: Any, sums: list[Any]) -> list[Any]:
                for u in range(unroll):
                    at = e.b.add(e.b.mul(i, I64(unroll)), I64(u))
                    w_offset = e.at(e.b.add(w_group, e.b.mul(at, I64(LANES * method.step))), 4 * LANES)
                    weights = [
                        [_load(e, weight_kind, e.at(e.at(a, w_offset), q * part_bytes)) for q in range(parts)]
                        for a in panel_at
                    ]
                    x_offset = e.b.add(x_group, e.b.mul(at, I64(method.step * method.x_bytes)))
                    out = []
                    for r in range(rows):
                        pattern = _broadcast(e, _load(e, I32, e.at(x_rows[r], x_offset)), method.lanes)
                        for p in range(panels):
                            for q in range(parts):
                                total = sums[(r * panels + p) * parts + q]
                                out.append(multiply_add(e, method, total, pattern, weights[p][q]))
                    sums = out
                return sums

            first: list[Any] = []
            for r in range(rows):
                start = ir.Constant(sum_kind, [0] * method.lanes)
                if method.kind == "vnni":
                    start = _broadcast(e, _load(e, I32, e.at(e.at(x_rows[r], first_at), scale_offset)), method.lanes)
                first += [start] * (panels * parts)
            sums = e.loop(count, first, step)
            out = []
            for r in range(rows):
                x_scale = e.broadcast(e.load_scalar(e.at(e.at(x_rows[r], scales_at), scale_offset)))
                for p in range(panels):
                    at = (r * panels + p) * parts
                    total = sums[at] if parts == 1 else _concatenate(e, sums[at], sums[at + 1])
                    value = e.b.fmul(e.b.sitofp(total, VECTOR), e.load(e.at(panel_at[p], w_group)))
                    out.append(e.b.fadd(totals[r * panels + p], e.b.fmul(value, x_scale)))
            return out

        totals = e.loop(groups, [e.constant(0.0)] * (rows * panels), one_group)
        store_rows(e, totals, row_addresses(e, y, y_stride, rows))

    return tile


def _vnni(e: Emitter, method: Method, total: Any, pattern: Any, weights: Any) -> Any:
    kind, int_kind = weights.type, total.type
    name = f"llvm.x86.avx512.vpdpbusd.{32 * method.lanes}"  # unsigned, then signed
    return _call(e, name, int_kind, total, weights, e.b.bitcast(pattern, kind))


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
