"""PTX text -> kernels with decoded instructions. Only the shape of the text is known here, not what instructions do."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.ptx.errors import Unsupported

TYPES = {
    **dict.fromkeys(("u8", "b8"), np.uint8),
    **dict.fromkeys(("u16", "b16"), np.uint16),
    **dict.fromkeys(("u32", "b32"), np.uint32),
    **dict.fromkeys(("u64", "b64"), np.uint64),
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Register:
    name: str
    negated: bool = False  # a predicate written !%p


@dataclass(frozen=True, slots=True)
class Immediate:
    value: int | float  # a float for 0f... and 0d... literals


@dataclass(frozen=True, slots=True)
class Name:
    """A label, a shared array or a parameter."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    base: Register | Name | Immediate
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    parts: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two destinations, ``%p|%q``."""

    first: Register
    second: Register


Operand = Register | Immediate | Name | Address | Vector | Pair


@dataclass(slots=True)
class Instruction:
    opcode: tuple[str, ...]  # split at the dots: ("ld", "global", "v4", "u32")
    operands: tuple[Operand, ...]
    predicate: Register | None
    where: str  # "paged_decode.cu:57 (from common.cuh:71) ld.global..."

    @property
    def dtype(self) -> type:
        """The numpy type of the last modifier."""
        return self.dtype_of(-1)

    def dtype_of(self, index: int) -> type:
        try:
            return TYPES[self.opcode[index]]
        except KeyError:
            raise Unsupported(f"type of {self.where}") from None

    def has(self, modifier: str) -> bool:
        return modifier in self.opcode


@dataclass(slots=True)
class SharedArray:
    name: str
    align: int  # bytes
    size: int  # bytes; 0 for the dynamic array


@dataclass(slots=True)
class Kernel:
    name: str
    parameters: list[tuple[str, type]]
    max_threads: int  # 0: not stated
    registers: dict[str, type] = field(default_factory=dict)  # name -> unsigned type, or np.bool_
    shared: list[SharedArray] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\n\{\n(.*?)\n\}", re.S)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr(?:\s+\.\w+)*?(?:\s+\.align\s+\d+)?\s+)?([\w$]+)"
)
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+)(?:<(\d+)>)?")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]+)"')
_LABEL = re.compile(r"(\$?[\w$]+):\s*")


def parse_module(text: str) -> dict[str, Kernel]:
    """All kernels of a PTX module, by symbol."""
    text = re.sub(r"//[^\n]*", "", text)
    files = {number: path.rsplit("/", 1)[-1] for number, path in _FILE.findall(text)}
    outside = _ENTRY.sub("", text)
    module_arrays = [_shared_array(match) for match in _SHARED.finditer(outside)]
    kernels = {}
    for symbol, parameters, attributes, body in _ENTRY.findall(text):
        threads = re.search(r"\.maxntid\s+([\d,\s]+)", attributes)
        kernel = Kernel(
            symbol,
            [(name, TYPES[kind]) for kind, name in _PARAMETER.findall(parameters)],
            int(np.prod([int(n) for n in threads[1].replace(" ", "").strip(",\n").split(",")])) if threads else 0,
        )
        kernel.shared = [array for array in module_arrays if re.search(rf"{re.escape(array.name)}\b", body)]
        _parse_body(kernel, body, files)
        kernels[symbol] = kernel
    return kernels


def _shared_array(match: re.Match[str]) -> SharedArray:
    align, kind, name, count = match.groups()
    return SharedArray(name, int(align), np.dtype(TYPES[kind]).itemsize * int(1 if count is None else count or 0))


def _parse_body(kernel: Kernel, body: str, files: dict[str, str]) -> None:
    location = ""
    pending = ""
    for raw in body.split("\n"):
        line = raw.strip()
        if line.startswith(".loc"):
            location = _location(line, files)
            continue
        if not pending:
            while match := _LABEL.match(line):
                kernel.labels[match[1]] = len(kernel.code)
                line = line[match.end() :]
            if line in ("", "{", "}"):
                continue
        pending = f"{pending} {line}".strip()
        while ";" in pending:
            statement, _, pending = pending.partition(";")
            pending = pending.strip().removeprefix("}").strip()
            _parse_statement(kernel, " ".join(statement.split()), location)


def _location(line: str, files: dict[str, str]) -> str:
    """``.loc 2 71 3, function_name ..., inlined_at 1 57 5`` -> "x.cu:57 (from common.cuh:71)"."""
    own, _, outer = line.removeprefix(".loc").partition("inlined_at")
    number, row = own.split()[:2]
    here = f"{files.get(number, number)}:{row}"
    if not outer:
        return here
    number, row = outer.replace(",", " ").split()[:2]
    return f"{files.get(number, number)}:{row} (from {here})"


def _parse_statement(kernel: Kernel, statement: str, location: str) -> None:
    if statement.startswith("{ "):  # an inline-assembly scope opens
        statement = statement[2:]
    if match := _REGISTERS.match(statement):
        kind, name, count = match.groups()
        dtype = np.bool_ if kind == "pred" else UNSIGNED[np.dtype(TYPES[kind]).itemsize]
        names = [f"{name}{i}" for i in range(int(count))] if count else [name]
        kernel.registers.update(dict.fromkeys(names, dtype))
        return
    if match := _SHARED.match(statement):
        kernel.shared.append(_shared_array(match))
        return
    if statement.startswith(".pragma") or not statement:
        return
    if statement.startswith("."):
        raise Unsupported(f"directive {statement}")
    predicate = None
    text = statement
    if text.startswith("@"):
        guard, _, text = text[1:].partition(" ")
        predicate = Register(guard.lstrip("!"), guard.startswith("!"))
    opcode, _, rest = text.partition(" ")
    operands = tuple(_parse_operand(part) for part in _split(rest))
    kernel.code.append(Instruction(tuple(opcode.split(".")), operands, predicate, f"{location} {statement}".strip()))


def _split(text: str) -> list[str]:
    """At the commas outside braces and brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def _parse_operand(text: str) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(_parse_operand(part) for part in _split(text[1:-1])))
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        inner = _parse_operand(base.strip())
        assert isinstance(inner, Register | Name | Immediate)
        return Address(inner, int(offset or "0", 0))
    if "|" in text:
        first, second = (part.strip() for part in text.split("|"))
        return Pair(Register(first), Register(second))
    if text.startswith("!%"):
        return Register(text[1:], negated=True)
    if text.startswith("%") or text == "_":
        return Register(text)
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        return Immediate(float(np.array(int(text[2:], 16), np.uint32).view(np.float32)))
    if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", text):
        return Immediate(float(np.array(int(text[2:], 16), np.uint64).view(np.float64)))
    if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    return Name(text)
