"""ld and st: parameters, global and shared memory, vectors of two and four."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.operands import address, destination, destinations, parts, reader
from tests.kernels.ptx.parse import UNSIGNED, Address, Instruction, Name

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Action, Machine


def _space(instruction: Instruction) -> str:
    for name in ("global", "shared"):
        if instruction.has(name):
            return name
    raise Unsupported(instruction.where)


def _load(instruction: Instruction) -> Action:
    if instruction.opcode[1] == "param":
        return _load_parameter(instruction)
    where, space, dtype = instruction.where, _space(instruction), np.dtype(instruction.dtype)
    names = destinations(instruction.operands[0], where)
    at = address(instruction.operands[1], where)
    width = dtype.itemsize * len(names)

    def run(machine: Machine) -> None:
        lanes = machine.lanes()
        memory = machine.shared if space == "shared" else machine.globals
        data = memory.load(at(machine)[lanes], lanes, width, where)
        elements = np.ascontiguousarray(data).view(dtype).reshape(-1, len(names))
        for index, name in enumerate(names):
            values = np.zeros(machine.num_lanes, dtype)
            values[lanes] = elements[:, index]
            machine.put(name, values)

    return run


def _load_parameter(instruction: Instruction) -> Action:
    source = instruction.operands[1]
    if not isinstance(source, Address) or not isinstance(source.base, Name) or source.offset:
        raise Unsupported(instruction.where)
    to, name = destination(instruction.operands[0], instruction.where), source.base.name
    unsigned = UNSIGNED[np.dtype(instruction.dtype).itemsize]

    def run(machine: Machine) -> None:
        value: Any = machine.arguments[name]
        machine.put(to, np.full(machine.num_lanes, np.array(value).view(unsigned)))

    return run


def _store(instruction: Instruction) -> Action:
    where, space, dtype = instruction.where, _space(instruction), instruction.dtype
    at = address(instruction.operands[0], where)
    values = [reader(part, dtype, where) for part in parts(instruction.operands[1])]

    def run(machine: Machine) -> None:
        lanes = machine.lanes()
        memory = machine.shared if space == "shared" else machine.globals
        elements: npt.NDArray[Any] = np.stack([value(machine)[lanes] for value in values], axis=1)
        data = np.ascontiguousarray(elements).view(np.uint8).reshape(len(lanes), -1)
        memory.store(at(machine)[lanes], lanes, data, where)

    return run


BUILDERS: dict[str, Callable[[Instruction], Action]] = {"ld": _load, "st": _store}
