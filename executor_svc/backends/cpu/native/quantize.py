"""Activations as int8, compiled: the same bits as ``backends.cpu.quantize``, in the layout that the products want."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from executor_svc.backends.cpu.native.gemm_int8 import I8, I16, Method
from executor_svc.backends.cpu.native.vector import F32, I32, I64, INT_VECTOR, LANES, Emitter, kernel
from executor_svc.backends.cpu.quantize import LIMIT, TINY

_LARGEST_FINITE = 0x7F7FFFFF


def make_quantize_row(method: Method) -> Any:
    """A compiled ``quantize_row(x, out, scale, vectors)``: float32 [16 vectors] -> activations and one float32 scale.

    ``out``: int16, or for ``vnni`` uint8 of q + 128.
    """

    @kernel(4)
    def quantize_row(e: Emitter, x: Any, out: Any, scale: Any, vectors: Any) -> None:
        magnitude = ir.Constant(INT_VECTOR, [0x7FFFFFFF] * LANES)

        def largest_of(index: Any, state: list[Any]) -> list[Any]:
            value = e.load(e.at(x, e.b.mul(index, I64(4 * LANES))))
            return [_maximum(e, e.b.and_(e.b.bitcast(value, INT_VECTOR), magnitude), state[0])]

        # As integers, magnitudes sort like the floats they are, with infinity and then NaN above all.
        bits = e.reduce(
            e.loop(vectors, [ir.Constant(INT_VECTOR, [0] * LANES)], largest_of)[0], lambda a, b: _maximum(e, a, b)
        )
        largest = e.b.bitcast(bits, F32)
        e.store_scalar(e.b.fdiv(largest, F32(float(LIMIT))), scale)
        finite = e.b.icmp_signed("<=", bits, I32(_LARGEST_FINITE))
        usable = e.b.and_(finite, e.b.fcmp_ordered(">=", largest, F32(TINY)))
        inverse = e.b.select(usable, e.b.fdiv(F32(float(LIMIT)), largest), F32(0.0))
        factor, chosen = e.broadcast(inverse), e.broadcast(usable)
        narrow = ir.VectorType(I8 if method.kind == "vnni" else I16, LANES)

        def convert(index: Any, state: list[Any]) -> list[Any]:
            value = e.b.select(chosen, e.load(e.at(x, e.b.mul(index, I64(4 * LANES)))), e.constant(0.0))
            whole = e.b.fptosi(e.rint(e.b.fmul(value, factor)), INT_VECTOR)
            if method.kind == "vnni":
                whole = e.b.add(whole, ir.Constant(INT_VECTOR, [128] * LANES))
            address = e.at(out, e.b.mul(index, I64(LANES * method.x_bytes)))
            e.b.store(e.b.trunc(whole, narrow), e.b.inttoptr(address, narrow.as_pointer())).align = 1
            return []

        e.loop(vectors, [], convert)

    return quantize_row


def _maximum(e: Emitter, a: Any, b: Any) -> Any:
    return e.b.select(e.b.icmp_signed(">", a, b), a, b)
