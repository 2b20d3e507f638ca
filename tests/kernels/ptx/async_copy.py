"""cp.async: copies that land at the latest moment allowed, the wait for their group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.operands import address, reader
from tests.kernels.ptx.parse import Immediate, Instruction

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Action, Machine

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Copy:
    lanes: Int64  # [n]
    group: Int64  # [n] number of the issuing lane's group
    targets: Int64  # [n] shared addresses
    data: npt.NDArray[np.uint8]  # [n, 16]
    where: str


class AsyncCopies:
    """What is in flight. Every lane numbers its own groups; ``committed`` is how many it has closed."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._committed = np.zeros(machine.num_lanes, np.int64)
        self._flying: list[_Copy] = []

    def issue(self, lanes: Int64, targets: Int64, data: npt.NDArray[np.uint8], where: str) -> None:
        self._machine.shared.invalidate(targets, lanes, 16, where)
        self._flying.append(_Copy(lanes, self._committed[lanes].copy(), targets, data, where))

    def commit(self, lanes: Int64) -> None:
        self._committed[lanes] += 1

    def wait(self, mask: npt.NDArray[np.bool_], pending: int) -> None:
        """Lands the groups of the lanes in ``mask`` except each one's newest ``pending``."""
        still: list[_Copy] = []
        for copy in self._flying:
            lands = mask[copy.lanes] & (copy.group < self._committed[copy.lanes] - pending)
            if lands.all():
                self._machine.shared.store(copy.targets, copy.lanes, copy.data, copy.where)
            elif not lands.any():
                still.append(copy)
            else:
                self._machine.shared.store(copy.targets[lands], copy.lanes[lands], copy.data[lands], copy.where)
                rest = ~lands
                still.append(_Copy(copy.lanes[rest], copy.group[rest], copy.targets[rest], copy.data[rest], copy.where))
        self._flying = still

    def check_finished(self) -> None:
        """Data in flight when its thread ends could land in another block's memory."""
        if self._flying:
            copy = self._flying[0]
            raise self._machine.error("a thread ends before its copy has landed", copy.lanes[0], copy.where)


def _copy(instruction: Instruction) -> Action:
    where = instruction.where
    if instruction.opcode[1] != "async":
        raise Unsupported(where)
    if instruction.has("commit_group"):
        return lambda machine: machine.copies.commit(machine.lanes())
    if instruction.has("wait_group"):
        count = instruction.operands[0]
        if not isinstance(count, Immediate):
            raise Unsupported(where)
        pending = int(count.value)
        return lambda machine: machine.copies.wait(machine.mask, pending)
    if instruction.opcode[2:] != ("cg", "shared", "global") or instruction.operands[2] != Immediate(16):
        raise Unsupported(where)
    target = address(instruction.operands[0], where)
    source = address(instruction.operands[1], where)
    valid = reader(instruction.operands[3], np.uint32, where) if len(instruction.operands) > 3 else None

    def run(machine: Machine) -> None:
        lanes = machine.lanes()
        size = valid(machine)[lanes].astype(np.int64) if valid else np.full(len(lanes), 16)
        if ((size != 0) & (size != 16)).any():
            raise Unsupported(f"a copy of a part: {where}")
        data = np.zeros((len(lanes), 16), np.uint8)
        full = size == 16
        data[full] = machine.globals.load(source(machine)[lanes][full], lanes[full], 16, where)
        machine.copies.issue(lanes, target(machine)[lanes], data, where)

    return run


BUILDERS: dict[str, Callable[[Instruction], Action]] = {"cp": _copy}
