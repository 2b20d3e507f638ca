"""Each instruction against values worked out in plain Python."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.kernels.handmade import evaluate, make_kernel, run_module
from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.parse import parse_module

I32 = [0, 1, -1, 2, -7, 100, 2**31 - 1, -(2**31), 12345678]
J32 = [3, -5, 2**31 - 1, 1, 7, -(2**31), 31]
U32 = [value % 2**32 for value in I32]
V32 = [value % 2**32 for value in J32]
U64 = [0, 1, 2**63, 2**64 - 1, 2**32 + 5, 0xDEADBEEFCAFEBABE]
V64 = [3, 2**64 - 1, 7, 2**33]
F32 = [0.0, -0.0, 1.5, -2.25, 1e30, -1e30, math.inf, -math.inf, math.nan, 0.1]
G32 = [2.0, -3.0, math.nan, 0.5, math.inf, 7.25, 1e-30]


def _lanes(values: list[Any]) -> list[Any]:
    return [values[i % len(values)] for i in range(32)]


def _f32(x: float) -> float:
    return (
        struct.unpack("f", struct.pack("f", x))[0]
        if abs(x) < 3.4e38 or not math.isfinite(x)
        else math.copysign(math.inf, x)
    )


def _signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def _trunc_div(a: int, b: int) -> int:
    return int(math.copysign(abs(a) // abs(b), a * b)) if a else 0


INTEGER_CASES: list[tuple[str, str, str, list[int], list[int], Callable[[int, int], int]]] = [
    ("add.s32", "s32", "s32", I32, J32, lambda a, b: _signed(a + b)),
    ("sub.s32", "s32", "s32", I32, J32, lambda a, b: _signed(a - b)),
    ("mul.lo.s32", "s32", "s32", I32, J32, lambda a, b: _signed(a * b)),
    ("mul.hi.s32", "s32", "s32", I32, J32, lambda a, b: a * b >> 32),
    ("mul.hi.u64", "u64", "u64", U64, V64, lambda a, b: a * b >> 64),
    ("mul.wide.s32", "s64", "s32", I32, J32, lambda a, b: a * b),
    ("mul.wide.u32", "u64", "u32", U32, V32, lambda a, b: a * b),
    ("div.s32", "s32", "s32", [-7, 7, 100], [2, -2, 7], _trunc_div),
    ("div.s64", "s64", "s64", [-(2**40), 2**50 + 1], [3, -7], _trunc_div),
    ("div.u32", "u32", "u32", U32, [3, 2**31, 1], lambda a, b: a // b),
    ("rem.s32", "s32", "s32", [-7, 7, 100], [2, -2, 7], lambda a, b: int(math.fmod(a, b))),
    ("min.s32", "s32", "s32", I32, J32, min),
    ("max.s32", "s32", "s32", I32, J32, max),
    ("min.u64", "u64", "u64", U64, V64, min),
    ("and.b32", "u32", "u32", U32, V32, lambda a, b: a & b),
    ("or.b32", "u32", "u32", U32, V32, lambda a, b: a | b),
    ("xor.b64", "u64", "u64", U64, V64, lambda a, b: a ^ b),
    ("add.s64", "s64", "s64", [2**62, -5], [2**62, 7], lambda a, b: _signed(a + b, 64)),
]


@pytest.mark.parametrize("case", INTEGER_CASES, ids=lambda case: case[0])
def test_integers(case: tuple[str, str, str, list[int], list[int], Callable[[int, int], int]]) -> None:
    name, result, kind, a, b, expected = case
    out = evaluate(f"{name} %d, %a, %b;", result, a=(kind, a), b=(kind, b))
    assert out.tolist() == [expected(x, y) for x, y in zip(_lanes(a), _lanes(b), strict=True)]


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("shl.b32", "u32", lambda a, n: a << n & 2**32 - 1 if n < 32 else 0),
        ("shr.u32", "u32", lambda a, n: a >> n if n < 32 else 0),
        ("shr.s32", "s32", lambda a, n: a >> min(n, 31)),
        ("shl.b64", "u64", lambda a, n: a << n & 2**64 - 1 if n < 64 else 0),
    ],
)
def test_shifts(name: str, kind: str, expected: Callable[[int, int], int]) -> None:
    values = {"u32": U32, "s32": I32, "u64": U64}[kind]
    amounts = [0, 1, 31, 32, 33, 63, 64, 100]
    out = evaluate(f"{name} %d, %a, %n;", kind, a=(kind, values), n=("u32", amounts))
    assert out.tolist() == [expected(a, n) for a, n in zip(_lanes(values), _lanes(amounts), strict=True)]


def test_multiply_add() -> None:
    out = evaluate("mad.lo.s32 %d, %a, %b, %a;", "s32", a=("s32", I32), b=("s32", J32))
    assert out.tolist() == [_signed(a * b + a) for a, b in zip(_lanes(I32), _lanes(J32), strict=True)]
    out = evaluate("mad.wide.s32 %d, %a, %b, %c;", "s64", a=("s32", I32), b=("s32", J32), c=("s64", [2**40, -1]))
    expected = [a * b + c for a, b, c in zip(_lanes(I32), _lanes(J32), _lanes([2**40, -1]), strict=True)]
    assert out.tolist() == expected


def test_bits() -> None:
    def one(instruction: str) -> list[int]:
        return evaluate(f"{instruction} %d, %a;", "u32", a=("u32", U32)).tolist()

    lanes = _lanes(U32)
    assert one("popc.b32") == [bin(a).count("1") for a in lanes]
    assert one("clz.b32") == [32 - a.bit_length() for a in lanes]
    assert one("brev.b32") == [int(f"{a:032b}"[::-1], 2) for a in lanes]
    assert one("not.b32") == [a ^ 2**32 - 1 for a in lanes]
    assert one("bfind.u32") == [a.bit_length() - 1 if a else 2**32 - 1 for a in lanes]
    assert one("bfind.shiftamt.u32") == [32 - a.bit_length() if a else 2**32 - 1 for a in lanes]
    out = evaluate("popc.b64 %d, %a;", "u32", a=("u64", U64))
    assert out.tolist() == [bin(a).count("1") for a in _lanes(U64)]
    out = evaluate("clz.b64 %d, %a;", "u32", a=("u64", U64))
    assert out.tolist() == [64 - a.bit_length() for a in _lanes(U64)]
    out = evaluate("bfi.b32 %d, %a, %b, 5, 7;", "u32", a=("u32", U32), b=("u32", V32))
    assert out.tolist() == [b & ~(127 << 5) | (a & 127) << 5 for a, b in zip(lanes, _lanes(V32), strict=True)]
    out = evaluate("bfe.u32 %d, %a, 3, 9;", "u32", a=("u32", U32))
    assert out.tolist() == [a >> 3 & 511 for a in lanes]
    out = evaluate("lop3.b32 %d, %a, %b, %c, 0xCA;", "u32", a=("u32", U32), b=("u32", V32), c=("u32", [0xF0F0F0F0]))
    expected = [a & b | ~a & 0xF0F0F0F0 & 2**32 - 1 for a, b in zip(lanes, _lanes(V32), strict=True)]
    assert out.tolist() == expected


def _same(out: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_array_equal(out, np.array(expected, out.dtype))


def _ieee(function: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: _f32(function(a, b))


def _product(a: float, b: float) -> float:
    return a * b


def _minimum(a: float, b: float) -> float:
    return b if math.isnan(a) else a if math.isnan(b) else min(a, b)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("add.f32", _ieee(lambda a, b: a + b)),
        ("sub.rn.f32", _ieee(lambda a, b: a - b)),
        ("mul.f32", _ieee(_product)),
        ("min.f32", _minimum),
        ("max.f32", lambda a, b: -_minimum(-a, -b)),
        ("copysign.f32", lambda sign, size: math.copysign(size, sign)),
    ],
)
def test_floats(name: str, expected: Callable[[float, float], float]) -> None:
    out = evaluate(f"{name} %d, %a, %b;", "f32", a=("f32", F32), b=("f32", G32))
    _same(out, [expected(_f32(a), _f32(b)) for a, b in zip(_lanes(F32), _lanes(G32), strict=True)])


def test_fused_rounding() -> None:
    a = 1 + 2.0**-12  # a * a needs 25 bits
    assert evaluate("fma.rn.f32 %d, %a, %a, %c;", "f32", a=("f32", [a]), c=("f32", [-1.0]))[0] == np.float32(a * a - 1)
    # 3 * 5 + 2^24 lies between two floats: down, not to even
    out = evaluate("fma.rm.f32 %d, %a, %b, %c;", "f32", a=("f32", [3.0]), b=("f32", [5.0]), c=("f32", [2.0**24]))
    assert out[0] == 2**24 + 14
    out = evaluate("fma.rn.f32 %d, %a, %b, %c;", "f32", a=("f32", [3.0]), b=("f32", [5.0]), c=("f32", [2.0**24]))
    assert out[0] == 2**24 + 16


def test_functions() -> None:
    positive = [0.25, 1.0, 2.0, 9.0, 1e-3]
    for name, function in {
        "ex2.approx.ftz.f32": lambda x: 2.0**x,
        "lg2.approx.f32": math.log2,
        "sqrt.rn.f32": math.sqrt,
        "rsqrt.approx.f32": lambda x: x**-0.5,
        "rcp.rn.f32": lambda x: 1 / x,
        "neg.f32": lambda x: -x,
        "abs.f32": abs,
    }.items():
        out = evaluate(f"{name} %d, %a;", "f32", a=("f32", positive))
        np.testing.assert_allclose(out, [function(_f32(x)) for x in _lanes(positive)], rtol=3e-7, err_msg=name)
    _same(evaluate("ex2.approx.ftz.f32 %d, %a;", "f32", a=("f32", [-math.inf, -130.0])), _lanes([0.0, 0.0]))


@pytest.mark.parametrize(
    "comparison", ["lt", "le", "gt", "ge", "eq", "ne", "ltu", "leu", "gtu", "geu", "neu", "num", "nan"]
)
def test_comparisons(comparison: str) -> None:
    def expected(a: float, b: float) -> int:
        unordered = math.isnan(a) or math.isnan(b)
        if comparison in ("num", "nan"):
            return int(unordered == (comparison == "nan"))
        base = comparison.removesuffix("u")
        holds = {"lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "eq": a == b, "ne": a != b}[base]
        return int(comparison.endswith("u")) if unordered else int(holds)

    text = f"setp.{comparison}.f32 %p1, %a, %b; selp.u32 %d, 1, 0, %p1;"
    out = evaluate(text, "u32", a=("f32", [*F32, 2.0]), b=("f32", G32))
    pairs = zip(_lanes([*F32, 2.0]), _lanes(G32), strict=True)
    assert out.tolist() == [expected(_f32(a), _f32(b)) for a, b in pairs]


def test_predicates() -> None:
    text = (
        "setp.lt.and.s32 %p1|%p2, %a, %b, %q; selp.u32 %r8, 1, 0, %p1; selp.u32 %r9, 2, 0, %p2; add.u32 %d, %r8, %r9;"
    )
    a, b, q = I32, J32, [True, False, True]
    out = evaluate(text, "u32", a=("s32", a), b=("s32", b), q=("pred", q))
    lanes = zip(_lanes(a), _lanes(b), _lanes(q), strict=True)
    assert out.tolist() == [int(x < y and z) + 2 * int(x >= y and z) for x, y, z in lanes]
    text = "xor.pred %p1, %q, %s; not.pred %p2, %p1; and.pred %p3, %p2, %q; selp.u32 %d, 7, 9, %p3;"
    out = evaluate(text, "u32", q=("pred", [True, True, False]), s=("pred", [True, False]))
    pairs2 = zip(_lanes([True, True, False]), _lanes([True, False]), strict=True)
    assert out.tolist() == [7 if q and s else 9 for q, s in pairs2]
    out = evaluate("mov.u32 %d, 1; @!%q mov.u32 %d, 5;", "u32", q=("pred", [True, False]))
    assert out.tolist() == _lanes([1, 5])


def test_packing() -> None:
    out = evaluate("mov.b32 %d, {%a, %b};", "u32", a=("u16", [0x1234]), b=("u16", [0xABCD]))
    assert out[0] == 0xABCD1234
    out = evaluate("mov.b64 {%r8, %r9}, %a; sub.u32 %d, %r9, %r8;", "u32", a=("u64", [(7 << 32) + 2]))
    assert out[0] == 5


def test_conversions() -> None:
    def convert(name: str, result: str, kind: str, values: list[Any]) -> list[Any]:
        return evaluate(f"cvt.{name} %d, %a;", result, a=(kind, values))[: len(values)].tolist()

    halves = [2.5, -2.5, 3.5, 0.49, -0.51, 1e20, -1e20, math.nan]
    assert convert("rzi.s32.f32", "s32", "f32", halves) == [2, -2, 3, 0, 0, 2**31 - 1, -(2**31), 0]
    assert convert("rni.s32.f32", "s32", "f32", halves)[:5] == [2, -2, 4, 0, -1]
    assert convert("rzi.u64.f64", "u64", "f64", [1e18, -1.0, 2.9]) == [10**18, 0, 2]
    assert convert("rzi.s64.f64", "s64", "f64", [2.0**62, -(2.0**62), -2.9]) == [2**62, -(2**62), -2]
    assert convert("rmi.f64.f64", "f64", "f64", [2.5, -2.5]) == [2.0, -3.0]
    assert convert("rpi.f64.f64", "f64", "f64", [2.5, -2.5]) == [3.0, -2.0]
    assert convert("rn.f32.s32", "f32", "s32", [2**24 + 1, -3]) == [2.0**24, -3.0]
    assert convert("rn.f64.u64", "f64", "u64", [2**64 - 1, 5]) == [2.0**64, 5.0]
    assert convert("sat.f32.f32", "f32", "f32", [1.5, -1.0, 0.25, math.nan]) == [1.0, 0.0, 0.25, 0.0]
    assert convert("s64.s32", "s64", "s32", [-5, 5]) == [-5, 5]
    assert convert("u32.u64", "u32", "u64", [2**40 + 9]) == [9]
    assert convert("u64.u32", "u64", "u32", [2**32 - 1]) == [2**32 - 1]
    assert convert("f64.f32", "f64", "f32", [0.5]) == [0.5]
    assert convert("f32.f16", "f32", "u16", [0x3C01]) == [1 + 2**-10]
    assert convert("rn.f16.f32", "u16", "f32", [1 + 2**-11, 1 + 3 * 2**-11, 70000.0]) == [0x3C00, 0x3C02, 0x7C00]
    bf16 = convert("rn.bf16.f32", "u16", "f32", [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -2.0, math.inf, math.nan])
    assert bf16 == [0x3F80, 0x3F80, 0x3F82, 0xC000, 0x7F80, 0x7FFF]
    out = evaluate("cvt.rn.bf16x2.f32 %d, %a, %b;", "u32", a=("f32", [1.0]), b=("f32", [-2.0]))
    assert out[0] == 0x3F80C000  # the first source is the upper half
    out = evaluate("cvt.rn.f16x2.f32 %d, %a, %b;", "u32", a=("f32", [1.0]), b=("f32", [-2.0]))
    assert out[0] == 0x3C00C000


@pytest.mark.parametrize(
    ("mode", "by", "source"),
    [
        ("bfly", 5, lambda lane: lane ^ 5),
        ("down", 3, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("up", 4, lambda lane: lane - 4 if lane >= 4 else lane),
        ("idx", 9, lambda lane: 9),
    ],
)
def test_shuffles(mode: str, by: int, source: Callable[[int], int]) -> None:
    clamp = 0 if mode == "up" else 31
    text = f"shfl.sync.{mode}.b32 %d, %a, {by}, {clamp}, -1;"
    values = list(range(100, 132))
    assert evaluate(text, "u32", a=("u32", values)).tolist() == [values[source(lane)] for lane in range(32)]


def test_shuffle_in_segments() -> None:
    """Width 8: a clamp of 0x1807. The second result says whether the source was inside."""
    text = "shfl.sync.down.b32 %r8|%p1, %a, 6, 6151, -1; selp.u32 %r9, 1000, 0, %p1; add.u32 %d, %r8, %r9;"
    out = evaluate(text, "u32", a=("u32", list(range(32))))
    assert out.tolist() == [lane + 6 + 1000 if lane % 8 < 2 else lane for lane in range(32)]


def test_votes() -> None:
    q = [True, False, False, True, True]
    bits = sum(1 << lane for lane, value in enumerate(_lanes(q)) if value)
    assert evaluate("vote.sync.ballot.b32 %d, %q, -1;", "u32", q=("pred", q))[0] == bits
    for mode, value in (("any", 1), ("all", 0)):
        text = f"vote.sync.{mode}.pred %p1, %q, -1; selp.u32 %d, 1, 0, %p1;"
        assert evaluate(text, "u32", q=("pred", q)).tolist() == [value] * 32


def test_matrix_product() -> None:
    """D = A B + C on small integers, exact; the fragments are laid out here from the manual's formulas."""
    random = np.random.default_rng(0)
    a, b, c = (random.integers(-4, 5, shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    for kind in ("bf16", "f16"):
        packed = {}
        for name, matrix, count in (("a", a, 4), ("b", b, 2)):
            for register in range(count):
                words = []
                for lane in range(32):
                    g, t = lane >> 2, lane & 3
                    word = 0
                    for half in range(2):
                        i = register * 2 + half
                        if name == "a":
                            row = g if i < 2 or 4 <= i < 6 else g + 8
                            value = matrix[row, t * 2 + (i & 1) + (8 if i >= 4 else 0)]
                        else:
                            value = matrix[t * 2 + (i & 1) + (8 if i >= 2 else 0), g]
                        bits = (
                            np.float32(value).view(np.uint32) >> 16
                            if kind == "bf16"
                            else np.float16(value).view(np.uint16)
                        )
                        word |= int(bits) << 16 * half
                    words.append(word)
                packed[f"{name}{register}"] = ("u32", words)
        for register in range(4):
            words = [
                c[(lane >> 2) + (8 if register >= 2 else 0), (lane & 3) * 2 + (register & 1)] for lane in range(32)
            ]
            packed[f"c{register}"] = ("f32", words)
        expected = a @ b + c
        for register in range(4):
            text = (
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r8,%r9,%r10,%r11}},"
                " {%a0,%a1,%a2,%a3}, {%b0,%b1}, {%c0,%c1,%c2,%c3};"
                f" mov.b32 %d, %r{8 + register};"
            )
            out = evaluate(text, "f32", **packed)
            for lane in range(32):
                row = (lane >> 2) + (8 if register >= 2 else 0)
                assert out[lane] == expected[row, (lane & 3) * 2 + (register & 1)]


@pytest.mark.parametrize("transposed", [False, True])
def test_load_matrix(transposed: bool) -> None:
    """Lane l fills row l % 8 of matrix l / 8 with 100 l + column; the loaded pairs follow the manual."""
    body = """
mov.u32 %r1, %tid.x;
mul.lo.u32 %r2, %r1, 16;
mov.u32 %r3, tile;
add.u32 %r4, %r3, %r2;
mul.lo.u32 %r5, %r1, 100;
"""
    for column in range(8):
        body += f"add.u32 %r6, %r5, {column}; cvt.u16.u32 %h1, %r6; st.shared.u16 [%r4+{2 * column}], %h1;\n"
    trans = ".trans" if transposed else ""
    body += f"""
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r8,%r9,%r10,%r11}}, [%r4];
ld.param.u64 %rd1, [out];
mad.wide.u32 %rd2, %r1, 16, %rd1;
st.global.v4.u32 [%rd2], {{%r8,%r9,%r10,%r11}};
"""
    out = np.zeros((32, 4, 2), np.uint16)
    run_module(make_kernel(body, ["out"], shared=".shared .align 16 .b8 tile[512];"), [out])
    for lane in range(32):
        for matrix in range(4):
            for half in range(2):
                row, column = lane >> 2, (lane & 3) * 2 + half
                if transposed:
                    row, column = column, row
                assert out[lane, matrix, half] == 100 * (8 * matrix + row) + column


@pytest.mark.parametrize(("operation", "expected"), [("add", 10 + 496), ("max", 31), ("min", 0), ("or", 31)])
def test_atomics(operation: str, expected: int) -> None:
    body = f"""
mov.u32 %r1, %tid.x;
ld.param.u64 %rd1, [out];
red.global.{operation}.u32 [%rd1], %r1;
"""
    out = np.array([10], np.uint32)
    run_module(make_kernel(body, ["out"]), [out])
    assert out[0] == expected


def test_atomic_returns_the_old_value() -> None:
    body = """
mov.u32 %r1, %tid.x;
ld.param.u64 %rd1, [sum];
ld.param.u64 %rd2, [out];
atom.global.add.u32 %r2, [%rd1], 3;
mad.wide.u32 %rd3, %r1, 4, %rd2;
st.global.u32 [%rd3], %r2;
"""
    total, out = np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    run_module(make_kernel(body, ["sum", "out"]), [total, out])
    assert total[0] == 96
    assert sorted(out.tolist()) == list(range(0, 96, 3))


def test_loop_with_uneven_trips() -> None:
    """Lane n adds 1..n, one iteration each; all leave at different times and meet again."""
    body = """
mov.u32 %r1, %tid.x;
mov.u32 %r2, 0;
mov.u32 %r3, 0;
bra $L_test;
$L_loop:
add.u32 %r3, %r3, 1;
add.u32 %r2, %r2, %r3;
$L_test:
setp.lt.u32 %p1, %r3, %r1;
@%p1 bra $L_loop;
shfl.sync.idx.b32 %r4, %r2, 31, 31, -1;
ld.param.u64 %rd1, [out];
mad.wide.u32 %rd2, %r1, 8, %rd1;
st.global.v2.u32 [%rd2], {%r2, %r4};
"""
    out = np.zeros((32, 2), np.uint32)
    run_module(make_kernel(body, ["out"]), [out])
    assert out[:, 0].tolist() == [n * (n + 1) // 2 for n in range(32)]
    assert (out[:, 1] == 496).all()


def test_a_barrier_after_an_exit_that_comes_first_in_the_text() -> None:
    """Lanes that leave a loop early reach the barrier's text before the others: they wait there."""
    body = """
mov.u32 %r1, %tid.x;
mov.u32 %r2, 0;
bra $L_loop;
$L_meet:
bar.red.or.pred %p2, 0, %p1;
selp.u32 %r3, 1, 0, %p2;
ld.param.u64 %rd1, [out];
mad.wide.u32 %rd2, %r1, 4, %rd1;
st.global.u32 [%rd2], %r3;
ret;
$L_loop:
add.u32 %r2, %r2, 1;
setp.eq.u32 %p1, %r2, 70;
setp.gt.u32 %p3, %r2, %r1;
@%p3 bra $L_meet;
bra $L_loop;
"""
    out = np.full(96, 9, np.uint32)
    run_module(make_kernel(body, ["out"]), [out], block=96)
    assert out.tolist() == [1] * 96  # lane 69 leaves at 70


def test_unknown_instructions_are_refused() -> None:
    for text in ("foo.u32 %r1, %r2;", "setp.lt.xyz.u32 %p1, %r1, %r2, %p2;", "cvt.rz.bf16.f32 %h1, %r1;"):
        with pytest.raises(Unsupported):
            run_module(make_kernel(text, ["out"]), [np.zeros(1, np.uint32)])


def test_parse() -> None:
    text = make_kernel(
        ".loc 1 12 3\nmov.u32 %r1, %tid.x; // a comment\n.loc 1 99 3, function_name $L_s, inlined_at 1 40 5\n"
        "$L_x: @!%p1 bra $L_x;\nld.shared.v2.u32 {%r2, %r3}, [area+-8];",
        ["a", "b"],
        shared=".shared .align 8 .b8 area[24];\n.shared .align 4 .f32 one;",
    )
    kernel = parse_module(text)["k"]
    assert [name for name, _ in kernel.parameters] == ["a", "b"]
    assert [(array.name, array.align, array.size) for array in kernel.shared] == [("area", 8, 24), ("one", 4, 4)]
    assert kernel.labels == {"$L_x": 1}
    assert kernel.code[0].where == "hand.cu:12 mov.u32 %r1, %tid.x"
    assert kernel.code[1].where.startswith("hand.cu:40 (from hand.cu:99)")
    assert kernel.code[1].predicate is not None
    assert kernel.code[1].predicate.negated
    assert kernel.code[2].operands[1].offset == -8  # type: ignore[union-attr]
