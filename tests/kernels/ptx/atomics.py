"""Atomic operations on integers. Lanes go one after the other; where the old value is not used, all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.operands import address, destination, reader
from tests.kernels.ptx.parse import Instruction, Register

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Action, Machine

_FUNCTIONS: dict[str, np.ufunc] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or, "and": np.bitwise_and,
}  # fmt: skip


def _atomic(instruction: Instruction) -> Action:
    where, dtype = instruction.where, np.dtype(instruction.dtype)
    function = _FUNCTIONS.get(instruction.opcode[-2])
    space = "shared" if instruction.has("shared") else "global" if instruction.has("global") else ""
    if function is None or not space or dtype.kind == "f":
        raise Unsupported(where)
    returns = instruction.opcode[0] == "atom"
    to = destination(instruction.operands[0], where) if returns else "_"
    at = address(instruction.operands[1 if returns else 0], where)
    operand = reader(instruction.operands[2 if returns else 1], instruction.dtype, where)

    def run(machine: Machine) -> None:
        lanes = machine.lanes()
        memory = machine.shared if space == "shared" else machine.globals
        addresses, values = at(machine)[lanes], operand(machine)[lanes]
        # Same-address lanes are combined first; the old values are as if lanes came in order.
        keys = addresses + (machine.threads.block[lanes].astype(np.int64) << 40) if space == "shared" else addresses
        places, group = np.unique(keys, return_inverse=True)
        first = np.array([int(np.argmax(group == index)) for index in range(len(places))], np.int64)
        before = memory.load(addresses, lanes, dtype.itemsize, where, atomic=True).view(dtype).ravel()
        total = before[first].copy()
        old: npt.NDArray[Any] = np.zeros(machine.num_lanes, dtype)
        if to == "_" or not _is_read(machine, to):
            function.at(total, group, values)
        else:
            for index, lane in enumerate(lanes):
                old[lane] = total[group[index]]
                total[group[index]] = function(total[group[index]], values[index])
        # Every lane is recorded as a writer; all of one place write the combined value.
        data = np.ascontiguousarray(total[group]).view(np.uint8).reshape(len(lanes), -1)
        memory.store(addresses, lanes, data, where, atomic=True)
        machine.put(to, old)

    return run


def _is_read(machine: Machine, name: str) -> bool:
    """Whether any instruction uses the register as a source; the compiler names a result even if nobody wants it."""
    return any(
        operand == Register(name)
        for instruction in machine.kernel.code
        for operand in instruction.operands[0 if instruction.opcode[0] == "st" else 1 :]
    )


BUILDERS: dict[str, Callable[[Instruction], Action]] = {"atom": _atomic, "red": _atomic}
