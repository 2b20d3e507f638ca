"""Operations on one row at a time: norms, the gated activation, a softmax tile, rotary embedding."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit

from executor_svc.backends.cpu.native.vector import (
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
def silu_mul_row(e: Emitter, gate_up: Any, out: Any, pairs: Any) -> None:
    """``pairs`` of (16 gates, 16 ups), interleaved -> 16 silu(gate) * up each."""

    def step(index: Any, state: list[Any]) -> list[Any]:
        address = e.at(gate_up, e.b.mul(index, I64(8 * LANES)))
        gate, up = e.load(address), e.load(e.at(address, 4 * LANES))
        denominator = e.b.fadd(e.constant(1.0), e.exp(e.b.fneg(gate)))
        e.store(e.b.fmul(e.b.fdiv(gate, denominator), up), e.at(out, e.b.mul(index, I64(4 * LANES))))
        return []

    e.loop(pairs, [], step)


@kernel(5, 1)
def softmax_row(e: Emitter, scores: Any, visible: Any, largest: Any, total: Any, correction: Any, scale: Any) -> None:
    """One row's scores of a KV tile -> unnormalised weights, in place; updates the running maximum and total.

    ``visible``: how many of the tile's tokens the query sees (may be 0 or less: then nothing changes);
    ``correction`` receives the factor by which what was accumulated before must shrink.
    """
    lanes = ir.Constant(INT_VECTOR, list(range(LANES)))
    limit = e.broadcast(e.b.trunc(visible, I32))
    masks = [
        e.b.icmp_signed("<", e.b.add(lanes, ir.Constant(INT_VECTOR, [LANES * v] * LANES)), limit)
        for v in range(_VECTORS)
    ]
    factor = e.broadcast(scale)
    values = [
        e.b.select(masks[v], e.b.fmul(e.load(e.at(scores, 4 * LANES * v)), factor), e.constant(float("-inf")))
        for v in range(_VECTORS)
    ]
    before = e.load_scalar(largest)
    now = e.maximum(before, e.reduce(_tree(values, e.maximum), e.maximum))
    base = e.broadcast(now)
    weights = [e.b.select(masks[v], e.exp(e.b.fsub(values[v], base)), e.constant(0.0)) for v in range(_VECTORS)]
    for v in range(_VECTORS):
        e.store(weights[v], e.at(scores, 4 * LANES * v))
    shrink_vector = e.exp(e.b.fsub(e.broadcast(before), base))
    shrink = e.b.extract_element(shrink_vector, I32(0))
    # A row that sees none of this tile keeps its state exactly, also before its first visible token.
    nothing = e.b.icmp_signed("<=", visible, I64(0))
    shrink = e.b.select(nothing, F32(1.0), shrink)
    added = e.reduce(_tree(weights, e.b.fadd), e.b.fadd)
    e.store_scalar(e.b.fadd(e.b.fmul(e.load_scalar(total), shrink), added), total)
    e.store_scalar(now, largest)
    e.store_scalar(shrink, correction)


def _tree(values: list[Any], combine: Any) -> Any:
    while len(values) > 1:
        values = [combine(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


@kernel(3, 1)
def scale_row(e: Emitter, x: Any, out: Any, vectors: Any, divisor: Any) -> None:
    """out = x / divisor, ``vectors`` groups of 16."""
    by = e.broadcast(divisor)

    def step(index: Any, state: list[Any]) -> list[Any]:
        offset = e.b.mul(index, I64(4 * LANES))
        e.store(e.b.fdiv(e.load(e.at(x, offset)), by), e.at(out, offset))
        return []

    e.loop(vectors, [], step)


@kernel(3)
def copy_row(e: Emitter, source: Any, out: Any, vectors: Any) -> None:
    def step(index: Any, state: list[Any]) -> list[Any]:
        offset = e.b.mul(index, I64(4 * LANES))
        e.store(e.load(e.at(source, offset)), e.at(out, offset))
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
