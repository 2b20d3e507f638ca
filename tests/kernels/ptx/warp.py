"""Shuffles and votes. They synchronise lanes but order no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.operands import destination, predicate, reader
from tests.kernels.ptx.parse import Instruction, Pair

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Action, Machine

_LANES = np.arange(32, dtype=np.uint32)


def check_members(machine: Machine, members: npt.NDArray[Any], where: str) -> None:
    """The active lanes of a warp must be those that each of them names in its member mask."""
    active = machine.mask.reshape(-1, 32)
    present = np.packbits(active, axis=1, bitorder="little").view(np.uint32)  # [warps, 1]
    wrong = active & (members.reshape(-1, 32) != present)
    if wrong.any():
        raise machine.error("the active lanes are not those of the member mask", int(np.argmax(wrong.ravel())), where)


def _shuffle(instruction: Instruction) -> Action:
    where, mode = instruction.where, instruction.opcode[2]
    if mode not in ("bfly", "idx", "up", "down") or instruction.opcode[1] != "sync":
        raise Unsupported(where)
    target = instruction.operands[0]
    to = target.first.name if isinstance(target, Pair) else destination(target, where)
    inside = target.second.name if isinstance(target, Pair) else "_"
    value, second, clamp, members = (reader(operand, np.uint32, where) for operand in instruction.operands[1:5])

    def run(machine: Machine) -> None:
        check_members(machine, members(machine), where)
        lane = machine.lane_id
        by = second(machine).astype(np.int64) & 31
        packed = clamp(machine).astype(np.int64)
        segment, bound = packed >> 8 & 31, packed & 31
        lowest = lane & segment
        highest = lowest | (bound & ~segment)
        if mode == "bfly":
            source, ok = lane ^ by, (lane ^ by) <= highest
        elif mode == "down":
            source, ok = lane + by, lane + by <= highest
        elif mode == "up":
            source, ok = lane - by, lane - by >= highest
        else:
            source = lowest | (by & ~segment)
            ok = source <= highest
        source = np.where(ok, source, lane)
        absolute = np.arange(machine.num_lanes) - lane + source
        idle = machine.mask & ~machine.mask[absolute]
        if idle.any():
            raise machine.error("a shuffle reads a lane that takes no part", int(np.argmax(idle)), where)
        machine.put(to, value(machine)[absolute])
        if inside != "_":
            machine.put(inside, ok)

    return run


def _vote(instruction: Instruction) -> Action:
    where, mode = instruction.where, instruction.opcode[2]
    if mode not in ("ballot", "any", "all"):
        raise Unsupported(where)
    to = destination(instruction.operands[0], where)
    source = predicate(instruction.operands[1], where)
    members = reader(instruction.operands[2], np.uint32, where)

    def run(machine: Machine) -> None:
        check_members(machine, members(machine), where)
        active = machine.mask.reshape(-1, 32)
        votes = source(machine).reshape(-1, 32) & active
        result: Any
        if mode == "ballot":
            result = (votes * (np.uint64(1) << _LANES.astype(np.uint64))).sum(axis=1).astype(np.uint32)
        elif mode == "any":
            result = votes.any(axis=1)
        else:
            result = (votes | ~active).all(axis=1)
        machine.put(to, np.repeat(result, 32))

    return run


BUILDERS: dict[str, Callable[[Instruction], Action]] = {"shfl": _shuffle, "vote": _vote}
