"""Emitting LLVM IR for 16-lane float32 vectors, and the few scalar primitives that numba lacks.

A vector is always ``<16 x float>``: one AVX-512 register or two of AVX2, chosen by LLVM. Operations are IEEE-exact or
fused multiply-adds, and never reassociated, so the bits do not depend on that choice.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

LANES = 16

F32, F16, I32, I64 = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
INT_VECTOR = ir.VectorType(I32, LANES)

# Least-maximum fits of relative error, rounded to float32: 2^r = 1 + r (c0 + c1 r + ...) for |r| <= 1/2, and
# tanh x = x + x z (c0 + c1 z + ...) with z = x^2 for |x| <= 0.625.
_EXP2 = (0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
_TANH = (-0.3333328068256378, 0.13331441581249237, -0.05373971536755562, 0.02063908614218235, -0.005704985000193119)


_LOCALITY = 3  # into all caches


class Emitter:
    """Wraps an IR builder with the vector operations that the kernels use. Addresses are int64 values, in bytes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def at(self, address: ir.Value, byte_offset: ir.Value | int = 0) -> ir.Value:
        offset = I64(byte_offset) if isinstance(byte_offset, int) else byte_offset
        return self.b.add(address, offset)

    def load(self, address: ir.Value, element: ir.Type = F32) -> ir.Value:
        """16 consecutive elements as float32."""
        pointer = self.b.inttoptr(address, ir.VectorType(element, LANES).as_pointer())
        value = self.b.load(pointer)
        value.align = 2 if element is F16 else 4
        return self.b.fpext(value, VECTOR) if element is F16 else value

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.b.store(value, self.b.inttoptr(address, VECTOR.as_pointer())).align = 4

    def store_half(self, value: ir.Value, address: ir.Value) -> None:
        """Rounded to float16, ties to even."""
        kind = ir.VectorType(F16, LANES)
        self.b.store(self.b.fptrunc(value, kind), self.b.inttoptr(address, kind.as_pointer())).align = 2

    def load_address(self, address: ir.Value) -> ir.Value:
        """The int64 at an address."""
        return self.b.load(self.b.inttoptr(address, I64.as_pointer()))

    def load_scalar(self, address: ir.Value) -> ir.Value:
        value = self.b.load(self.b.inttoptr(address, F32.as_pointer()))
        value.align = 4
        return value

    def store_scalar(self, value: ir.Value, address: ir.Value) -> None:
        self.b.store(value, self.b.inttoptr(address, F32.as_pointer())).align = 4

    def prefetch(self, address: ir.Value) -> None:
        """Start to fetch the cache line at an address, which may be any."""
        name, pointer = "llvm.prefetch.p0i8", self.b.inttoptr(address, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
        function = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        self.b.call(function, [pointer, I32(0), I32(_LOCALITY), I32(1)])

    def constant(self, value: float) -> ir.Value:
        return ir.Constant(VECTOR, [value] * LANES)

    def broadcast(self, scalar: ir.Value) -> ir.Value:
        kind = ir.VectorType(scalar.type, LANES)
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.b.insert_element(undefined, scalar, I32(0))
        return self.b.shuffle_vector(one, undefined, ir.Constant(INT_VECTOR, [0] * LANES))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self._call("llvm.fma.v16f32", a, b, c)

    def sqrt(self, scalar: ir.Value) -> ir.Value:
        return self._call("llvm.sqrt.f32", scalar)

    def rint(self, x: ir.Value) -> ir.Value:
        """To the nearest whole number, ties to even."""
        return self._call("llvm.rint.v16f32", x)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Where either is NaN: b. Callers make NaN surface by arithmetic, not by comparison."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def reduce(self, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes to one scalar, by halving."""
        width = LANES
        while width > 1:
            width //= 2
            index = ir.VectorType(I32, width)
            low = ir.Constant(index, list(range(width)))
            high = ir.Constant(index, list(range(width, 2 * width)))
            value = combine(self.b.shuffle_vector(value, value, low), self.b.shuffle_vector(value, value, high))
        return self.b.extract_element(value, I32(0))

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x within 2 ulp; exactly 1 at 0; 0 below -87.3; clamped (not inf) above 88; NaN stays NaN."""
        low, high = self.constant(-87.3), self.constant(88.0)
        z = self.b.select(self.b.fcmp_ordered("<", x, low), low, x)
        z = self.b.select(self.b.fcmp_ordered(">", z, high), high, z)
        n = self.rint(self.b.fmul(z, self.constant(1.44269502162933349609375)))
        r = self.fma(n, self.constant(-0.693359375), z)
        r = self.fma(n, self.constant(2.12194440197199583053589e-4), r)
        p = self.constant(1.98756913e-4)
        for coefficient in (1.39819994e-3, 8.33345205e-3, 4.16657962e-2, 1.66666657e-1, 5.00000012e-1):
            p = self.fma(p, r, self.constant(_as_float32(coefficient)))
        p = self.fma(p, self.b.fmul(r, r), self.b.fadd(r, self.constant(1.0)))
        not_a_number = self.b.fcmp_unordered("uno", x, x)
        # A conversion of NaN to an integer is undefined in LLVM, so it gets a harmless exponent.
        n = self.b.select(not_a_number, self.constant(0.0), n)
        exponent = self.b.shl(
            self.b.add(self.b.fptosi(n, INT_VECTOR), ir.Constant(INT_VECTOR, [127] * LANES)),
            ir.Constant(INT_VECTOR, [23] * LANES),
        )
        result = self.b.fmul(p, self.b.bitcast(exponent, VECTOR))
        return self.b.select(self.b.fcmp_ordered("<", x, low), self.constant(0.0), result)

    def exp2_softmax(self, x: ir.Value) -> ir.Value:
        """2^x within 2 ulp for x <= 1, as a softmax needs it; exactly 1 at 0; 0 below -126; NaN stays NaN."""
        # Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; what overflows there is replaced by 0.
        shifted = self.b.fadd(x, self.constant(12582912.0))
        r = self.b.fsub(x, self.b.fsub(shifted, self.constant(12582912.0)))
        p = self.constant(_EXP2[-1])
        for coefficient in (*_EXP2[-2::-1], 1.0):
            p = self.fma(p, r, self.constant(coefficient))
        bits = self.b.shl(self.b.bitcast(shifted, INT_VECTOR), ir.Constant(INT_VECTOR, [23] * LANES))
        power = self.b.bitcast(self.b.add(bits, ir.Constant(INT_VECTOR, [127 << 23] * LANES)), VECTOR)
        alive = self.b.fcmp_unordered(">=", x, self.constant(-126.0))
        return self.b.select(alive, self.b.fmul(p, power), self.constant(0.0))

    def tanh(self, x: ir.Value) -> ir.Value:
        """tanh within 4 ulp, also near 0; NaN stays NaN."""
        magnitude, square = self._call("llvm.fabs.v16f32", x), self.b.fmul(x, x)
        p = self.constant(_TANH[-1])
        for coefficient in _TANH[-2::-1]:
            p = self.fma(p, square, self.constant(coefficient))
        near = self.fma(self.b.fmul(p, square), x, x)
        grown = self.b.fadd(self.exp(self.b.fadd(magnitude, magnitude)), self.constant(1.0))
        far = self.b.fsub(self.constant(1.0), self.b.fdiv(self.constant(2.0), grown))
        far = self._call("llvm.copysign.v16f32", far, x)
        return self.b.select(self.b.fcmp_ordered("<", magnitude, self.constant(0.625)), near, far)

    def loop(
        self, count: ir.Value, initial: Sequence[ir.Value], body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]
    ) -> list[ir.Value]:
        """``for i in range(count): state = body(i, state)``; count may be 0."""
        before = self.b.block
        head = self.b.append_basic_block("loop")
        inside = self.b.append_basic_block("body")
        after = self.b.append_basic_block("after")
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64)
        index.add_incoming(I64(0), before)
        state = []
        for value in initial:
            phi = self.b.phi(value.type)
            phi.add_incoming(value, before)
            state.append(phi)
        self.b.cbranch(self.b.icmp_signed("<", index, count), inside, after)
        self.b.position_at_end(inside)
        updated = body(index, list(state))
        index.add_incoming(self.b.add(index, I64(1)), self.b.block)
        for phi, value in zip(state, updated, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.branch(head)
        self.b.position_at_end(after)
        return list(state)

    def _call(self, name: str, *arguments: ir.Value) -> ir.Value:
        module = self.b.module
        kind = arguments[0].type
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [kind] * len(arguments)), name)
        return self.b.call(function, arguments)


def _as_float32(value: float) -> float:
    import numpy as np

    return float(np.float32(value))


def kernel(num_arguments: int, float_arguments: int = 0) -> Callable[[Callable[..., None]], Any]:
    """Decorate ``emit(e, *arguments)`` into a function that compiled code can call, returning nothing.

    The first ``num_arguments`` are int64, the rest float32.
    """

    def decorate(emit: Callable[..., None]) -> Any:
        names = ", ".join(f"a{i}" for i in range(num_arguments + float_arguments))
        kinds = [types.int64] * num_arguments + [types.float32] * float_arguments

        def typed(context: Any, *arguments: Any) -> Any:
            def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
                emit(Emitter(builder), *values)
                return context.get_dummy_value()

            return types.void(*kinds), generate

        scope: dict[str, Any] = {"typed": typed}
        exec(f"def {emit.__name__}(context, {names}):\n    return typed(context, {names})", scope)
        return intrinsic(scope[emit.__name__])

    return decorate


@intrinsic
def load_int(context: Any, address: Any) -> Any:
    """The int64 at an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], I64.as_pointer()))

    return types.int64(types.int64), generate


@intrinsic
def store_int(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        builder.store(values[1], builder.inttoptr(values[0], I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_float(context: Any, address: Any) -> Any:
    """The float32 at an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], F32.as_pointer()))

    return types.float32(types.int64), generate


@intrinsic
def store_float(context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        builder.store(values[1], builder.inttoptr(values[0], F32.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def store_half(context: Any, address: Any, value: Any) -> Any:
    """A float32, rounded to float16."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        half = builder.fptrunc(values[1], F16)
        builder.store(half, builder.inttoptr(values[0], F16.as_pointer())).align = 2
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def load_half(context: Any, address: Any) -> Any:
    """The float16 at an address, as float32."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        value = builder.load(builder.inttoptr(values[0], F16.as_pointer()))
        value.align = 2
        return builder.fpext(value, F32)

    return types.float32(types.int64), generate


@intrinsic
def atomic_add(context: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address; returns what was there. Sequentially consistent."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], I64.as_pointer()), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def spin_pause(context: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            name = "llvm.x86.sse2.pause"
            function = builder.module.globals.get(name)
            builder.call(function or ir.Function(builder.module, ir.FunctionType(ir.VoidType(), []), name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def as_pointer(context: Any, address: Any) -> Any:
    """An address as a void pointer, for ``carray``."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def store_cycles(context: Any, address: Any) -> Any:
    """Store the processor's time stamp (int64 ticks of constant rate) at an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        name, module = "llvm.readcyclecounter", builder.module
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(I64, []), name)
        builder.store(builder.call(function, []), builder.inttoptr(values[0], I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def call(context: Any, address: Any) -> Any:
    """Call the C function ``int f(void)`` at an address."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
        builder.call(builder.inttoptr(values[0], ir.FunctionType(I32, []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate
