"""Activations as int8, compiled: the same bits as ``backends.cpu.quantize``, in the layout that the products want."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from executor_svc.backends.cpu.native.gemm_int8 import I8, I16, Method
from executor_svc.backends.cpu.native.vector import F32, I32, I64, INT_VECTOR, LANES, Emitter, kernel
from executor_svc.backends.cpu.quantize import LIMIT, TINY

_LARGEST_FINITE = 0x7F7FFFFF


def make_quantize_row(method: Method) -> Any:
    """A compiled ``quantize_row(x, out, k, group)``: float32 [K] -> one row of activations (``gemm_int8``)."""

    @kernel(4)
    def quantize_row(e: Emitter, x: Any, out: Any, k: Any, group: Any) -> None:
        magnitude, zeros = (ir.Constant(INT_VECTOR, [value] * LANES) for value in (0x7FFFFFFF, 0))
        groups, vectors = e.b.udiv(k, group), e.b.udiv(group, I64(LANES))
        scales_at = e.at(out, e.b.mul(k, I64(method.x_bytes)))
        first_at = e.at(scales_at, e.b.mul(groups, I64(4)))
        narrow = ir.VectorType(I8 if method.x_bytes == 1 else I16, LANES)

        def one_group(index: Any, state: list[Any]) -> list[Any]:
            start = e.b.mul(index, group)
            source = e.at(x, e.b.mul(start, I64(4)))
            target = e.at(out, e.b.mul(start, I64(method.x_bytes)))

            def largest_of(i: Any, state: list[Any]) -> list[Any]:
                value = e.load(e.at(source, e.b.mul(i, I64(4 * LANES))))
                return [_maximum(e, e.b.and_(e.b.bitcast(value, INT_VECTOR), magnitude), state[0])]

            # As integers, magnitudes sort like the floats they are, with infinity and then NaN above all.
            bits = e.reduce(e.loop(vectors, [zeros], largest_of)[0], lambda a, b: _maximum(e, a, b))
            largest = e.b.bitcast(bits, F32)
            finite = e.b.icmp_signed("<=", bits, I32(_LARGEST_FINITE))
            usable = e.b.and_(finite, e.b.fcmp_ordered(">=", largest, F32(TINY)))
            inverse = e.b.select(usable, e.b.fdiv(F32(float(LIMIT)), largest), F32(0.0))
            factor, chosen = e.broadcast(inverse), e.broadcast(usable)

            def convert(i: Any, state: list[Any]) -> list[Any]:
                value = e.b.select(chosen, e.load(e.at(source, e.b.mul(i, I64(4 * LANES)))), e.constant(0.0))
                whole = e.b.fptosi(e.rint(e.b.fmul(value, factor)), INT_VECTOR)
                address = e.at(target, e.b.mul(i, I64(LANES * method.x_bytes)))
                e.b.store(e.b.trunc(whole, narrow), e.b.inttoptr(address, narrow.as_pointer())).align = 1
                return [e.b.add(state[0], whole)]

            total = e.reduce(e.loop(vectors, [zeros], convert)[0], e.b.add)
            offset = e.b.mul(index, I64(4))
            e.store_scalar(e.b.fdiv(largest, F32(float(LIMIT))), e.at(scales_at, offset))
            first = e.b.bitcast(e.b.mul(total, I32(-128)), F32)
            e.store_scalar(first, e.at(first_at, offset))
            return []

        e.loop(groups, [], one_group)

    return quantize_row


def _maximum(e: Emitter, a: Any, b: Any) -> Any:
    return e.b.select(e.b.icmp_signed(">", a, b), a, b)
