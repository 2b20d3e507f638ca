"""Operand readers: what an instruction's operand means, decided once, read at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.parse import UNSIGNED, Address, Immediate, Instruction, Name, Operand, Register, Vector

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Machine

Array = npt.NDArray[Any]
Reader = Callable[["Machine"], Array]


def reader(operand: Operand, dtype: type, where: str) -> Reader:
    """All lanes' values as ``dtype``; a wider register is cut, as PTX does."""
    wanted = np.dtype(dtype)
    unsigned = UNSIGNED[wanted.itemsize]
    if isinstance(operand, Register):
        name = operand.name

        def read_register(machine: Machine) -> Array:
            values = machine.registers[name]
            if values.itemsize != wanted.itemsize:
                if values.itemsize < wanted.itemsize:
                    raise Unsupported(f"{name} is narrower than its use: {where}")
                values = values.astype(unsigned)
            return values.view(wanted)

        return read_register
    if isinstance(operand, Immediate):
        if isinstance(operand.value, float):
            constant = np.array([operand.value], wanted if wanted.kind == "f" else np.float32).view(wanted)
        else:
            constant = np.array([operand.value & (1 << 8 * wanted.itemsize) - 1], unsigned).view(wanted)

        def read_constant(machine: Machine) -> Array:
            return np.broadcast_to(constant, machine.num_lanes)

        return read_constant
    if isinstance(operand, Name):
        symbol = operand.name

        def read_symbol(machine: Machine) -> Array:
            if symbol not in machine.symbols:
                raise Unsupported(f"symbol {symbol}: {where}")
            return np.full(machine.num_lanes, machine.symbols[symbol], wanted)

        return read_symbol
    raise Unsupported(f"operand {operand}: {where}")


def predicate(operand: Operand, where: str) -> Reader:
    if isinstance(operand, Immediate):
        constant = np.array([operand.value != 0])
        return lambda machine: np.broadcast_to(constant, machine.num_lanes)
    if not isinstance(operand, Register):
        raise Unsupported(f"predicate {operand}: {where}")
    name, negated = operand.name, operand.negated
    return lambda machine: ~machine.registers[name] if negated else machine.registers[name]


def address(operand: Operand, where: str) -> Callable[[Machine], npt.NDArray[np.int64]]:
    """All lanes' addresses: 64-bit global ones, or offsets into shared memory."""
    if not isinstance(operand, Address):
        raise Unsupported(f"address {operand}: {where}")
    base, offset = operand.base, operand.offset
    if isinstance(base, Register):
        name = base.name
        return lambda machine: machine.registers[name].astype(np.int64) + offset
    read = reader(base, np.uint32, where)
    return lambda machine: read(machine).astype(np.int64) + offset


def parts(operand: Operand) -> tuple[Operand, ...]:
    """A vector's elements, or the one operand."""
    return operand.parts if isinstance(operand, Vector) else (operand,)


def destination(operand: Operand, where: str) -> str:
    if not isinstance(operand, Register):
        raise Unsupported(f"destination {operand}: {where}")
    return operand.name


def destinations(operand: Operand, where: str) -> list[str]:
    return [destination(part, where) for part in parts(operand)]


def sources(instruction: Instruction, dtype: type, first: int = 1) -> list[Reader]:
    return [reader(operand, dtype, instruction.where) for operand in instruction.operands[first:]]
