"""Register tiles of attention: queries x keys of several pages at once, and weights x values over several pages.

Pages lie anywhere, so both read their addresses from a table; they hold float32 or float16 (``kv_type``), which is
widened as it is loaded. As in ``gemm``, every element is one fused multiply-add chain: over the head's elements for a
score, over the tokens in order for an output.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from numba import njit

from executor_svc.backends.cpu.native.gemm import BYTES, ELEMENT, add_products, row_addresses, store_rows
from executor_svc.backends.cpu.native.vector import I64, LANES, Emitter, kernel

AHEAD = 64  # bytes from a page's entry in a table of addresses to the entry of the page that is fetched meanwhile
# Rows x panels that fit the vector registers: 32 of 16 lanes (AVX-512), or 16 of 8 lanes (AVX2).
ATTENTION_TILES_AVX512 = dict.fromkeys(range(1, 7), 4)
ATTENTION_TILES_AVX2 = {1: 4, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1}


def _score_tile(rows: int, pages: int, kv_type: str) -> Any:
    """scores [rows, 16 pages] = q [rows, size] x keys; ``table``: addresses of key panels [size][16], and ``AHEAD``
    bytes further those of the panels to fetch meanwhile."""

    @kernel(6)
    def score_tile(e: Emitter, q: Any, q_stride: Any, table: Any, size: Any, scores: Any, stride: Any) -> None:
        q_rows = row_addresses(e, q, q_stride, rows)
        panels = [e.load_address(e.at(table, 8 * p)) for p in range(pages)]
        later = [e.load_address(e.at(table, AHEAD + 8 * p)) for p in range(pages)]

        def step(index: Any, sums: list[Any]) -> list[Any]:
            offset = e.b.mul(index, I64(BYTES[kv_type] * LANES))
            keys = [e.load(e.at(panel, offset), ELEMENT[kv_type]) for panel in panels]
            for panel in later:
                e.prefetch(e.at(panel, offset))
            return add_products(e, q_rows, e.b.mul(index, I64(4)), keys, sums)

        sums = e.loop(size, [e.constant(0.0)] * (rows * pages), step)
        store_rows(e, sums, row_addresses(e, scores, stride, rows))

    return score_tile


def _value_tile(rows: int, panels: int, kv_type: str) -> Any:
    """out [rows, 16 panels] = out * correction + weights [rows, tokens] x values.

    ``table``: addresses of value groups [16][row_bytes / 4], ``at`` bytes into each of whose rows the panels begin;
    ``correction``: float32 [rows].
    """

    @kernel(9)
    def value_tile(
        e: Emitter,
        weights: Any,
        weights_stride: Any,
        table: Any,
        at: Any,
        tokens: Any,
        row_bytes: Any,
        out: Any,
        out_stride: Any,
        correction: Any,
    ) -> None:
        weight_rows, out_rows = row_addresses(e, weights, weights_stride, rows), row_addresses(e, out, out_stride, rows)
        initial = []
        for r in range(rows):
            factor = e.broadcast(e.load_scalar(e.at(correction, 4 * r)))
            initial += [e.b.fmul(e.load(e.at(out_rows[r], 4 * LANES * p)), factor) for p in range(panels)]

        def page(index: Any, sums: list[Any]) -> list[Any]:
            entry = e.at(table, e.b.mul(index, I64(8)))
            group, later = e.at(e.load_address(entry), at), e.at(e.load_address(e.at(entry, AHEAD)), at)
            first, value_bytes = e.b.mul(index, I64(LANES)), e.b.sdiv(row_bytes, I64(4 // BYTES[kv_type]))
            left = e.b.sub(tokens, first)
            count = e.b.select(e.b.icmp_signed("<", left, I64(LANES)), left, I64(LANES))

            def token(lane: Any, sums: list[Any]) -> list[Any]:
                row = e.b.mul(lane, value_bytes)
                values = [
                    e.load(e.at(e.at(group, row), BYTES[kv_type] * LANES * p), ELEMENT[kv_type]) for p in range(panels)
                ]
                for p in range(0, panels, 4 // BYTES[kv_type]):  # one for each cache line
                    e.prefetch(e.at(e.at(later, row), BYTES[kv_type] * LANES * p))
                return add_products(e, weight_rows, e.b.mul(e.b.add(first, lane), I64(4)), values, sums)

            return e.loop(count, sums, token)

        pages = e.b.sdiv(e.b.add(tokens, I64(LANES - 1)), I64(LANES))
        store_rows(e, e.loop(pages, initial, page), out_rows)

    return value_tile


def _across(make: Any, tiles: dict[int, int], parameters: str, arguments: str) -> Any:
    """A compiled ``run(rows, count, <parameters>)``: tiles of ``make(rows, width)`` side by side; ``p`` in
    ``arguments`` is how many of ``count`` panels or pages are done."""
    scope: dict[str, Any] = {}
    lines = [f"def run(rows, count, {parameters}):", "    p = 0"]
    for rows, most in tiles.items():
        lines.append(f"    {'if' if rows == 1 else 'elif'} rows == {rows}:")
        for width in [most] if most == 1 else [most, 1]:
            scope[f"tile_{rows}_{width}"] = make(rows, width)
            lines.append(f"        while p + {width} <= count:")
            lines.append(f"            tile_{rows}_{width}({arguments})")
            lines.append(f"            p += {width}")
    exec("\n".join(lines), scope)
    return njit(nogil=True, error_model="numpy")(scope["run"])


def make_score(tiles: dict[int, int], kv_type: str) -> Any:
    """A compiled ``score(rows, pages, q, q_stride, table, size, scores, stride)`` for any rows; strides in bytes."""
    run = _across(
        partial(_score_tile, kv_type=kv_type), tiles, "q, q_stride, table, size, scores, stride",
        f"q, q_stride, table + p * 8, size, scores + p * {4 * LANES}, stride",
    )  # fmt: skip
    most = max(tiles)

    @njit(nogil=True, error_model="numpy")
    def score(rows, pages, q, q_stride, table, size, scores, stride):  # type: ignore[no-untyped-def]
        for row in range(0, rows, most):
            height = min(most, rows - row)
            run(height, pages, q + row * q_stride, q_stride, table, size, scores + row * stride, stride)

    return score


def make_accumulate(tiles: dict[int, int], kv_type: str) -> Any:
    """A compiled ``accumulate(rows, panels, weights, stride, table, tokens, row_bytes, out, correction)`` for any
    rows; ``row_bytes`` is the size of a head, and the stride of ``out``."""
    run = _across(
        partial(_value_tile, kv_type=kv_type), tiles, "weights, stride, table, tokens, row_bytes, out, correction",
        f"weights, stride, table, p * {BYTES[kv_type] * LANES}, tokens, row_bytes, out + p * {4 * LANES}, row_bytes, "
        "correction",
    )  # fmt: skip
    most = max(tiles)

    @njit(nogil=True, error_model="numpy")
    def accumulate(rows, panels, weights, stride, table, tokens, row_bytes, out, correction):  # type: ignore[no-untyped-def]
        for row in range(0, rows, most):
            height = min(most, rows - row)
            run(
                height, panels, weights + row * stride, stride, table, tokens, row_bytes, out + row * row_bytes,
                correction + row * 4,
            )  # fmt: skip

    return accumulate
