"""Operations on one row at a time: norms, biases, the gated activation, softcaps, a softmax tile, rotary embedding."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit

from executor_svc.backends.cpu.native.vector import (
    F16,
    F32,
    I32,
    I64,
    INT_VECTOR,
    LANES,
    Emitter,
    kernel,
    load_float,
    store_float,
)

KV_TILE = 64  # tokens of one softmax tile
_VECTORS = KV_TILE // LANES


@kernel(6, 2)
def add_norm_row(
    e: Emitter, x: Any, delta: Any, weight: Any, out: Any, vectors: Any, add: Any, inverse_size: Any, epsilon: Any
) -> None:
    """x += delta (when ``add`` is 1); out = weight * (x / rms(x)). ``vectors`` groups of 16 elements."""
    adding = e.b.icmp_signed("!=", add, I64(0))

    def accumulate(index: Any, state: list[Any]) -> list[Any]:
        offset = e.b.mul(index, I64(4 * LANES))
        value = e.load(e.at(x, offset))
        value = e.b.select(adding, e.b.fadd(value, e.load(e.at(delta, offset))), value)
        e.store(value, e.at(x, offset))
        return [e.fma(value, value, state[0])]

    squares = e.loop(vectors, [e.constant(0.0)], accumulate)[0]
    mean = e.b.fmul(e.reduce(squares, e.b.fadd), inverse_size)
    inverse = e.broadcast(e.b.fdiv(F32(1.0), e.sqrt(e.b.fadd(mean, epsilon))))

    def scale(index: Any, state: list[Any]) -> list[Any]:
        offset = e.b.mul(index, I64(4 * LANES))
        value = e.b.fmul(e.load(e.at(weight, offset)), e.b.fmul(e.load(e.at(x, offset)), inverse))
        e.store(value, e.at(out, offset))
        return []

    e.loop(vectors, [], scale)


@kernel(3)
def add_row(e: Emitter, x: Any, y: Any, vectors: Any) -> None:
    """x += y, ``vectors`` groups of 16."""

    def step(index: Any, state: list[Any]) -> list[Any]:
        offset = e.b.mul(index, I64(4 * LANES))
        address = e.at(x, offset)
        e.store(e.b.fadd(e.load(address), e.load(e.at(y, offset))), address)
        return []

    e.loop(vectors, [], step)


@kernel(3, 1)
def add_scaled_row(e: Emitter, x: Any, y: Any, vectors: Any, scale: Any) -> None:
    """x += scale * y, ``vectors`` groups of 16."""
    factor = e.broadcast(scale)

    def step(index: Any, state: list[Any]) -> list[Any]:
        offset = e.b.mul(index, I64(4 * LANES))
        address = e.at(x, offset)
        e.store(e.fma(e.load(e.at(y, offset)), factor, e.load(address)), address)
        return []

    e.loop(vectors, [], step)


@kernel(3, 2)
def gate_mul_row(e: Emitter, gate_up: Any, out: Any, pairs: Any, linear: Any, cubic: Any) -> None:
    """``pairs`` of (16 gates, 16 ups), interleaved -> 16 g sigmoid(g (linear + cubic g^2)) * up each.

    silu: linear 1, cubic 0. gelu by tanh: 0.5 (1 + tanh u) = sigmoid(2 u), so linear 2 sqrt(2 / pi), cubic 0.044715
    times that.
    """
    first, third, most = e.broadcast(linear), e.broadcast(cubic), e.constant(1e30)

    def step(index: Any, state: list[Any]) -> list[Any]:
        address = e.at(gate_up, e.b.mul(index, I64(8 * LANES)))
        gate, up = e.load(address), e.load(e.at(address, 4 * LANES))
        square = e.b.fmul(gate, gate)
        square = e.b.select(e.b.fcmp_ordered("<", square, most), square, most)  # 0 x inf is NaN
        power = e.b.fmul(gate, e.fma(square, third, first))
        denominator = e.b.fadd(e.constant(1.0), e.exp(e.b.fneg(power)))
        e.store(e.b.fmul(e.b.fdiv(gate, denominator), up), e.at(out, e.b.mul(index, I64(4 * LANES))))
        return []

    e.loop(pairs, [], step)


@kernel(2, 2)
def softcap_row(e: Emitter, x: Any, vectors: Any, inner: Any, cap: Any) -> None:
    """x = cap * tanh(inner * x), in place."""
    factor, limit = e.broadcast(inner), e.broadcast(cap)

    def step(index: Any, state: list[Any]) -> list[Any]:
        address = e.at(x, e.b.mul(index, I64(4 * LANES)))
        e.store(e.b.fmul(limit, e.tanh(e.b.fmul(e.load(address), factor))), address)
        return []

    e.loop(vectors, [], step)


def _first_lanes(e: Emitter, count: Any) -> list[Any]:
    """For each vector of a KV tile, the mask of its lanes among the tile's first ``count``."""
    lanes = ir.Constant(INT_VECTOR, list(range(LANES)))
    limit = e.broadcast(e.b.trunc(count, I32))
    return [
        e.b.icmp_signed("<", e.b.add(lanes, ir.Constant(INT_VECTOR, [LANES * v] * LANES)), limit)
        for v in range(_VECTORS)
    ]


@kernel(2)
def hide_row(e: Emitter, scores: Any, hidden: Any) -> None:
    """The first ``hidden`` scores of a KV tile become -inf."""
    for v, mask in enumerate(_first_lanes(e, hidden)):
        address = e.at(scores, 4 * LANES * v)
        e.store(e.b.select(mask, e.constant(float("-inf")), e.load(address)), address)


@kernel(5, 1)
def softmax_row(e: Emitter, scores: Any, visible: Any, largest: Any, total: Any, correction: Any, factor: Any) -> None:
    """One row's scores of a KV tile -> unnormalised weights 2^(factor (score - largest)), in place.

    ``factor``: log2(e) times the scale. Updates the running maximum (of scores, a scalar) and the running total
    (16 partial sums). ``visible``: how many of the tile's tokens the query sees (may be 0 or less: then nothing
    changes); ``correction`` receives the factor by which what was accumulated before must shrink.
    """
    masks = _first_lanes(e, visible)
    lowest = e.constant(float("-inf"))
    values = [e.b.select(masks[v], e.load(e.at(scores, 4 * LANES * v)), lowest) for v in range(_VECTORS)]
    before = e.load_scalar(largest)
    now = e.maximum(before, e.reduce(_tree(values, e.maximum), e.maximum))
    base = e.b.fmul(now, factor)
    factors, negative_base = e.broadcast(factor), e.broadcast(e.b.fneg(base))
    weights = [
        e.b.select(masks[v], e.exp2_softmax(e.fma(values[v], factors, negative_base)), e.constant(0.0))
        for v in range(_VECTORS)
    ]
    for v in range(_VECTORS):
        e.store(weights[v], e.at(scores, 4 * LANES * v))
    shrink = e.exp2_softmax(e.broadcast(e.b.fsub(e.b.fmul(before, factor), base)))
    # A row that sees none of this tile keeps its state exactly, also before its first visible token.
    nothing = e.b.icmp_signed("<=", visible, I64(0))
    shrink = e.b.select(nothing, F32(1.0), e.b.extract_element(shrink, I32(0)))
    e.store(e.fma(e.load(total), e.broadcast(shrink), _tree(weights, e.b.fadd)), total)
    e.store_scalar(now, largest)
    e.store_scalar(shrink, correction)


def _tree(values: list[Any], combine: Any) -> Any:
    while len(values) > 1:
        values = [combine(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


@kernel(4)
def divide_row(e: Emitter, x: Any, out: Any, vectors: Any, total: Any) -> None:
    """out = x / (sum of the 16 floats at ``total``), ``vectors`` groups of 16."""
    by = e.broadcast(e.reduce(e.load(total), e.b.fadd))

    def step(index: Any, state: list[Any]) -> list[Any]:
        offset = e.b.mul(index, I64(4 * LANES))
        e.store(e.b.fdiv(e.load(e.at(x, offset)), by), e.at(out, offset))
        return []

    e.loop(vectors, [], step)


@kernel(2)
def clear_row(e: Emitter, out: Any, vectors: Any) -> None:
    def step(index: Any, state: list[Any]) -> list[Any]:
        e.store(e.constant(0.0), e.at(out, e.b.mul(index, I64(4 * LANES))))
        return []

    e.loop(vectors, [], step)


@kernel(3)
def copy_row(e: Emitter, source: Any, out: Any, vectors: Any) -> None:
    def step(index: Any, state: list[Any]) -> list[Any]:
        offset = e.b.mul(index, I64(4 * LANES))
        e.store(e.load(e.at(source, offset)), e.at(out, offset))
        return []

    e.loop(vectors, [], step)


@kernel(3)
def copy_row_from_half(e: Emitter, source: Any, out: Any, vectors: Any) -> None:
    """float16 -> float32, ``vectors`` groups of 16."""

    def step(index: Any, state: list[Any]) -> list[Any]:
        e.store(e.load(e.at(source, e.b.mul(index, I64(2 * LANES))), F16), e.at(out, e.b.mul(index, I64(4 * LANES))))
        return []

    e.loop(vectors, [], step)


@kernel(3)
def copy_row_to_half(e: Emitter, source: Any, out: Any, vectors: Any) -> None:
    """float32 -> float16, ``vectors`` groups of 16."""

    def step(index: Any, state: list[Any]) -> list[Any]:
        value = e.load(e.at(source, e.b.mul(index, I64(4 * LANES))))
        e.store_half(value, e.at(out, e.b.mul(index, I64(2 * LANES))))
        return []

    e.loop(vectors, [], step)


@njit(nogil=True, error_model="numpy")
def rotate_head(x, table, half):  # type: ignore[no-untyped-def]
    """Rotate one head in place; ``table``: cos [half], sin [half]. Plain loops: exact, so free to vectorise."""
    for i in range(half):
        low, high = load_float(x + 4 * i), load_float(x + 4 * (half + i))
        cos, sin = load_float(table + 4 * i), load_float(table + 4 * (half + i))
        store_float(x + 4 * i, low * cos - high * sin)
        store_float(x + 4 * (half + i), high * cos + low * sin)
