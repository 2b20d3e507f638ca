"""Branches, ends and barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.operands import destination, predicate
from tests.kernels.ptx.parse import Immediate, Instruction, Name

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Action, Machine


def _branch(instruction: Instruction) -> Action:
    target = instruction.operands[0]
    if not isinstance(target, Name):
        raise Unsupported(instruction.where)
    label = target.name
    return lambda machine: machine.branch(label, machine.mask)


def _return(instruction: Instruction) -> Action:
    return lambda machine: machine.leave(machine.mask)


def _block_barrier(machine: Machine) -> None:
    """The machine brings whole blocks here (``Machine._meet``)."""
    machine.threads.block_barrier[machine.mask.reshape(machine.num_blocks, -1).any(axis=1)] = machine.stamp


def _barrier(instruction: Instruction) -> Action:
    where = instruction.where
    if instruction.opcode[1] == "warp":
        return lambda machine: _warp_barrier(machine, where)
    reduction = instruction.opcode[1:] == ("red", "or", "pred")
    number = instruction.operands[1 if reduction else 0]
    plain = instruction.opcode[1:] == ("sync",) and len(instruction.operands) == 1
    if not (plain or reduction) or instruction.predicate or number != Immediate(0):
        raise Unsupported(where)
    if not reduction:
        return _block_barrier
    to = destination(instruction.operands[0], where)
    value = predicate(instruction.operands[2], where)

    def reduce(machine: Machine) -> None:
        _block_barrier(machine)
        any_of = (value(machine) & machine.mask).reshape(machine.num_blocks, -1).any(axis=1)
        machine.put(to, np.repeat(any_of, machine.block_size))

    return reduce


def _warp_barrier(machine: Machine, where: str) -> None:
    machine.threads.warp_barrier[machine.whole_warps(where)] = machine.stamp


BUILDERS: dict[str, Callable[[Instruction], Action]] = {
    "bra": _branch,
    "ret": _return,
    "exit": _return,
    "bar": _barrier,
    "barrier": _barrier,
}
