"""Arithmetic, comparison and bit operations on registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.operands import Reader, destination, destinations, predicate, reader, sources
from tests.kernels.ptx.parse import UNSIGNED, Instruction, Pair, Vector

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Action, Machine

Array = npt.NDArray[Any]
Function = Callable[..., Array]


def _simple(instruction: Instruction, function: Function) -> Action:
    """destination = function(sources), all of the instruction's type."""
    dtype = instruction.dtype
    to = destination(instruction.operands[0], instruction.where)
    read = sources(instruction, dtype)
    wanted = np.dtype(dtype)

    def run(machine: Machine) -> None:
        result = function(*(source(machine) for source in read))
        machine.put(to, result if result.dtype == wanted else result.astype(wanted))

    return run


def _logical(instruction: Instruction, function: Function) -> Action:
    """As ``_simple``, on predicates."""
    to = destination(instruction.operands[0], instruction.where)
    read = [predicate(operand, instruction.where) for operand in instruction.operands[1:]]
    return lambda machine: machine.put(to, function(*(source(machine) for source in read)))


_WIDER: dict[type, type] = {np.int16: np.int32, np.uint16: np.uint32, np.int32: np.int64, np.uint32: np.uint64}


def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of the product. 64 bits: by parts, unsigned only."""
    if a.itemsize < 8:
        wide = _WIDER[a.dtype.type]
        return (a.astype(wide) * b.astype(wide) >> (8 * a.itemsize)).astype(a.dtype)
    if a.dtype != np.uint64:
        raise Unsupported("mul.hi.s64")
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
    middle = a1 * b0 + (a0 * b0 >> shift)
    return a1 * b1 + (middle >> shift) + (a0 * b1 + (middle & low) >> shift)


def _multiply(instruction: Instruction) -> Action:
    if instruction.has("wide"):
        dtype = instruction.dtype
        wide = _WIDER[dtype]
        to = destination(instruction.operands[0], instruction.where)
        a, b = sources(instruction, dtype)
        return lambda machine: machine.put(to, a(machine).astype(wide) * b(machine).astype(wide))
    if instruction.has("hi"):
        return _simple(instruction, multiply_high)
    return _simple(instruction, np.multiply)


def _multiply_add(instruction: Instruction) -> Action:
    dtype = instruction.dtype
    if np.dtype(dtype).kind != "f":
        if not instruction.has("wide"):
            if not instruction.has("lo"):
                raise Unsupported(instruction.where)
            return _simple(instruction, lambda a, b, c: a * b + c)
        wide = _WIDER[dtype]
        to = destination(instruction.operands[0], instruction.where)
        a, b = (reader(operand, dtype, instruction.where) for operand in instruction.operands[1:3])
        c = reader(instruction.operands[3], wide, instruction.where)
        return lambda machine: machine.put(to, a(machine).astype(wide) * b(machine).astype(wide) + c(machine))
    if dtype is not np.float32:
        raise Unsupported(instruction.where)  # float64 products need 106 bits
    down = instruction.has("rm")

    def fused(a: Array, b: Array, c: Array) -> Array:
        exact = a.astype(np.float64) * b + c  # the product is exact in 53 bits
        rounded = exact.astype(np.float32)
        return np.where(rounded > exact, np.nextafter(rounded, np.float32(-np.inf)), rounded) if down else rounded

    return _simple(instruction, fused)


def _truncated_quotient(a: Array, b: Array) -> Array:
    b = np.where(b == 0, 1, b).astype(b.dtype)  # inactive lanes may hold anything
    if a.dtype.kind == "u":
        return a // b
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def _divide(instruction: Instruction) -> Action:
    if np.dtype(instruction.dtype).kind == "f":
        return _simple(instruction, np.divide)
    return _simple(instruction, _truncated_quotient)


def _shift(instruction: Instruction) -> Action:
    dtype = instruction.dtype
    bits = 8 * np.dtype(dtype).itemsize
    to = destination(instruction.operands[0], instruction.where)
    value = reader(instruction.operands[1], dtype, instruction.where)
    amount = reader(instruction.operands[2], np.uint32, instruction.where)
    left, signed = instruction.opcode[0] == "shl", np.dtype(dtype).kind == "i"

    def run(machine: Machine) -> None:
        v, by = value(machine), amount(machine)
        kept = np.minimum(by, bits - 1).astype(v.dtype)
        result = v << kept if left else v >> kept
        machine.put(to, result if signed and not left else np.where(by >= bits, v.dtype.type(0), result))

    return run


_COMPARE: dict[str, Function] = {
    "lt": np.less, "lo": np.less, "le": np.less_equal, "ls": np.less_equal, "gt": np.greater, "hi": np.greater,
    "ge": np.greater_equal, "hs": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_UNORDERED = {"ltu": np.greater_equal, "leu": np.greater, "gtu": np.less_equal, "geu": np.less, "equ": np.not_equal}


def compare(name: str, a: Array, b: Array) -> Array:
    """Ordered comparisons are false with a NaN (``ne`` too), unordered ones true."""
    if name == "neu":
        return a != b
    if name in _UNORDERED and name != "equ":
        return ~_UNORDERED[name](a, b)
    if name == "num":
        return ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return np.isnan(a) | np.isnan(b)
    if name == "equ":
        return (a == b) | np.isnan(a) | np.isnan(b)
    result = _COMPARE[name](a, b)
    return result & ~(np.isnan(a) | np.isnan(b)) if name == "ne" and a.dtype.kind == "f" else result


def _set_predicate(instruction: Instruction) -> Action:
    name = instruction.opcode[1]
    if name not in _COMPARE and name not in _UNORDERED and name not in ("neu", "num", "nan"):
        raise Unsupported(instruction.where)
    where, combine = instruction.where, instruction.opcode[2]
    a, b = (reader(operand, instruction.dtype, where) for operand in instruction.operands[1:3])
    extra = predicate(instruction.operands[3], where) if len(instruction.operands) > 3 else None
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(combine)
    if (extra is None) != (join is None):
        raise Unsupported(where)
    target = instruction.operands[0]
    pair = isinstance(target, Pair)
    first = target.first.name if isinstance(target, Pair) else destination(target, where)

    def run(machine: Machine) -> None:
        result = compare(name, a(machine), b(machine))
        other = ~result
        if join is not None and extra is not None:
            also = extra(machine)
            result, other = join(result, also), join(other, also)
        machine.put(first, result)
        if pair and isinstance(target, Pair):
            machine.put(target.second.name, other)

    return run


def _select(instruction: Instruction) -> Action:
    to = destination(instruction.operands[0], instruction.where)
    a, b = (reader(operand, instruction.dtype, instruction.where) for operand in instruction.operands[1:3])
    choose = predicate(instruction.operands[3], instruction.where)
    return lambda machine: machine.put(to, np.where(choose(machine), a(machine), b(machine)))


def _move(instruction: Instruction) -> Action:
    where = instruction.where
    if instruction.opcode[-1] == "pred":
        return _logical(instruction, lambda a: a.copy())
    target, source = instruction.operands
    whole = np.dtype(instruction.dtype)
    if isinstance(source, Vector):  # pack, first element lowest
        part = UNSIGNED[whole.itemsize // len(source.parts)]
        read = [reader(operand, part, where) for operand in source.parts]
        to = destination(target, where)

        def pack(machine: Machine) -> None:
            machine.put(to, np.ascontiguousarray(np.stack([r(machine) for r in read], axis=1)).view(whole).ravel())

        return pack
    if isinstance(target, Vector):  # unpack
        names = destinations(target, where)
        part = UNSIGNED[whole.itemsize // len(names)]
        value = reader(source, instruction.dtype, where)

        def unpack(machine: Machine) -> None:
            pieces = np.ascontiguousarray(value(machine)).view(part).reshape(-1, len(names))
            for index, name in enumerate(names):
                machine.put(name, np.ascontiguousarray(pieces[:, index]))

        return unpack
    return _simple(instruction, lambda a: a)


def bit_length(a: Array) -> Array:
    """Index of the highest set bit plus one; 0 for 0."""
    high = np.frexp((a >> a.dtype.type(32)).astype(np.float64))[1] if a.itemsize == 8 else np.zeros(a.shape, np.int32)
    low = np.frexp((a & a.dtype.type(0xFFFFFFFF)).astype(np.float64))[1]
    return np.where(high > 0, high + 32, low).astype(np.int64)


def _count_bits(instruction: Instruction) -> Action:
    """popc, clz, bfind: a 32-bit result from the instruction's type."""
    name, where = instruction.opcode[0], instruction.where
    dtype = UNSIGNED[np.dtype(instruction.dtype).itemsize]
    bits = 8 * np.dtype(dtype).itemsize
    if name == "bfind" and np.dtype(instruction.dtype).kind == "i":
        raise Unsupported(where)
    to = destination(instruction.operands[0], where)
    source = reader(instruction.operands[1], dtype, where)
    shift_amount = instruction.has("shiftamt")

    def run(machine: Machine) -> None:
        a = source(machine)
        if name == "popc":
            result = np.bitwise_count(a).astype(np.uint32)
        elif name == "clz":
            result = (bits - bit_length(a)).astype(np.uint32)
        else:
            length = bit_length(a)
            found = bits - length if shift_amount else length - 1
            result = np.where(length > 0, found, 0xFFFFFFFF).astype(np.uint32)
        machine.put(to, result)

    return run


def _reverse(a: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, a.itemsize), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype).ravel()


def _field(instruction: Instruction) -> Action:
    """bfi d, a, b, position, length: the low bits of a into b. bfe d, a, position, length (unsigned)."""
    where, dtype = instruction.where, instruction.dtype
    insert = instruction.opcode[0] == "bfi"
    if not insert and np.dtype(dtype).kind == "i":
        raise Unsupported(where)
    to = destination(instruction.operands[0], where)
    values = [reader(operand, dtype, where) for operand in instruction.operands[1 : 3 if insert else 2]]
    position, length = (reader(operand, np.uint32, where) for operand in instruction.operands[-2:])
    bits = 8 * np.dtype(dtype).itemsize

    def run(machine: Machine) -> None:
        at, count = (value(machine).astype(np.uint64) & np.uint64(255) for value in (position, length))
        mask = np.where(count >= bits, ~np.uint64(0), (np.uint64(1) << np.minimum(count, 63)) - np.uint64(1))
        if insert:
            a, b = (value(machine).astype(np.uint64) for value in values)
            result = (b & ~(mask << at)) | ((a & mask) << at)
        else:
            result = values[0](machine).astype(np.uint64) >> at & mask
        machine.put(to, result.astype(dtype))

    return run


def _lop3(instruction: Instruction) -> Action:
    to = destination(instruction.operands[0], instruction.where)
    read: list[Reader] = [reader(operand, np.uint32, instruction.where) for operand in instruction.operands[1:5]]

    def run(machine: Machine) -> None:
        a, b, c = (source(machine) for source in read[:3])
        table = int(read[3](machine)[0])
        result = np.zeros_like(a)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        machine.put(to, result)

    return run


def _numeric(function: Function, logical: Function | None = None) -> Callable[[Instruction], Action]:
    def build(instruction: Instruction) -> Action:
        if instruction.opcode[-1] == "pred":
            if logical is None:
                raise Unsupported(instruction.where)
            return _logical(instruction, logical)
        return _simple(instruction, function)

    return build


def _extreme(integer: Function, floating: Function) -> Callable[[Instruction], Action]:
    """min and max: of a number and a NaN, the number."""

    def build(instruction: Instruction) -> Action:
        return _simple(instruction, floating if np.dtype(instruction.dtype).kind == "f" else integer)

    return build


def _remainder(a: Array, b: Array) -> Array:
    return a - _truncated_quotient(a, b) * np.where(b == 0, 1, b).astype(b.dtype)


def _flush(a: Array) -> Array:
    return np.where(np.abs(a) < np.finfo(np.float32).tiny, np.float32(0), a)


def _exp2(instruction: Instruction) -> Action:
    if instruction.has("ftz"):
        return _simple(instruction, lambda a: _flush(np.exp2(_flush(a))))
    return _simple(instruction, np.exp2)


BUILDERS: dict[str, Callable[[Instruction], Action]] = {
    "add": _numeric(np.add),
    "sub": _numeric(np.subtract),
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": _multiply_add,
    "div": _divide,
    "rem": _numeric(_remainder),
    "min": _extreme(np.minimum, np.fmin),
    "max": _extreme(np.maximum, np.fmax),
    "and": _numeric(np.bitwise_and, np.logical_and),
    "or": _numeric(np.bitwise_or, np.logical_or),
    "xor": _numeric(np.bitwise_xor, np.logical_xor),
    "not": _numeric(np.bitwise_not, np.logical_not),
    "neg": _numeric(np.negative),
    "abs": _numeric(np.abs),
    "copysign": _numeric(lambda sign, magnitude: np.copysign(magnitude, sign)),
    "shl": _shift,
    "shr": _shift,
    "setp": _set_predicate,
    "selp": _select,
    "mov": _move,
    "popc": _count_bits,
    "clz": _count_bits,
    "bfind": _count_bits,
    "brev": _numeric(_reverse),
    "bfi": _field,
    "bfe": _field,
    "lop3": _lop3,
    "ex2": _exp2,
    "lg2": _numeric(np.log2),
    "rcp": _numeric(np.reciprocal),
    "sqrt": _numeric(np.sqrt),
    "rsqrt": _numeric(lambda a: 1 / np.sqrt(a)),
}
