"""One launch: lanes, registers, and the order in which instructions run.

::

    groups = {instruction: lanes that stand there}
    take the lowest instruction, run it for its lanes, pass them on to the next one (or to a branch's target, or out);
    lanes that arrive where others stand join them; at an instruction that warps or blocks run together, lanes are
    parked until the others come; if nobody else can move, that is an error, or a smaller member mask

A register is one array over all lanes of the grid; instructions compute all lanes and keep those that are active.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx import arithmetic, async_copy, atomics, control, convert, loads, tensor, warp
from tests.kernels.ptx.async_copy import AsyncCopies
from tests.kernels.ptx.errors import PtxError, Unsupported
from tests.kernels.ptx.memory import GlobalMemory, SharedMemory
from tests.kernels.ptx.parse import TYPES, Instruction, Kernel
from tests.kernels.ptx.races import Threads
from tests.kernels.ptx.stats import Stats

Mask = npt.NDArray[np.bool_]
Action = Callable[["Machine"], None]

_BUILDERS: dict[str, Callable[[Instruction], Action]] = {
    **arithmetic.BUILDERS, **convert.BUILDERS, **control.BUILDERS, **loads.BUILDERS, **atomics.BUILDERS,
    **warp.BUILDERS, **tensor.BUILDERS, **async_copy.BUILDERS,
}  # fmt: skip


def compile_kernel(kernel: Kernel) -> list[Action]:
    """One action an instruction; ``Unsupported`` for an unknown one, whether or not it would run."""
    actions = []
    for instruction in kernel.code:
        builder = _BUILDERS.get(instruction.opcode[0])
        if builder is None:
            raise Unsupported(f"{kernel.name}: {instruction.where}")
        actions.append(builder(instruction))
    return actions


def narrowest_access(kernel: Kernel, space: str) -> int:
    """Bytes of the narrowest element that the kernel moves to or from ``space``: the granule of its checks."""
    widths = [16]
    for instruction in kernel.code:
        name = instruction.opcode[0]
        if name in ("ld", "st", "atom", "red") and instruction.has(space):
            count = 4 if instruction.has("v4") else 2 if instruction.has("v2") else 1
            widths.append(np.dtype(TYPES[instruction.opcode[-1]]).itemsize * count)
    return min(widths)


def scope_of(instruction: Instruction) -> str:
    """Who runs an instruction together: "block", "warp" or "" for every lane by itself."""
    name = instruction.opcode[0]
    if name in ("bar", "barrier"):
        return "warp" if instruction.has("warp") else "block"
    return "warp" if name in ("shfl", "vote", "ldmatrix", "mma") else ""


class Machine:
    def __init__(
        self,
        kernel: Kernel,
        actions: list[Action],
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        dynamic_smem: int,
        check_races: bool = True,
        stats: Stats | None = None,
    ) -> None:
        self.kernel, self._actions = kernel, actions
        self.block_size = int(np.prod(block))
        self.num_blocks = int(np.prod(grid))
        if self.block_size % 32:
            raise PtxError(f"{kernel.name}: {self.block_size} threads are not whole warps")
        if kernel.max_threads and self.block_size > kernel.max_threads:
            raise PtxError(f"{kernel.name}: {self.block_size} threads, compiled for {kernel.max_threads}")
        self.num_lanes = self.block_size * self.num_blocks
        self.check_races, self.stats = check_races, stats
        self.global_granule = narrowest_access(kernel, "global")
        self.shared_granule = narrowest_access(kernel, "shared")
        lanes = np.arange(self.num_lanes)
        blocks = (lanes // self.block_size).astype(np.int32)
        self.threads = Threads(blocks, np.zeros(self.num_blocks, np.int32), np.zeros(self.num_lanes // 32, np.int32))
        self.lane_id = (lanes % 32).astype(np.int64)
        self.registers: dict[str, npt.NDArray[Any]] = _special_registers(lanes, grid, block)
        for name, dtype in kernel.registers.items():  # a value that no kernel should use
            self.registers[name] = (
                np.zeros(self.num_lanes, bool) if dtype is np.bool_ else np.full(self.num_lanes, -1).astype(dtype)
            )
        self.arguments: dict[str, np.generic] = {}
        self.symbols, size = _place_shared(kernel, dynamic_smem)
        self.shared = SharedMemory(self, size)
        self.globals = GlobalMemory(self)
        self.copies = AsyncCopies(self)
        self.stamp = 0  # of the current instruction
        self.mask: Mask = np.ones(self.num_lanes, bool)  # lanes that run it
        self.full = True  # no living lane is left out
        self._alive = self.num_lanes
        self._groups: dict[int, Mask] = {}
        self._parked: dict[int, Mask] = {}
        self._forced: set[int] = set()  # parked lanes were let go here: nobody else can come
        self._scopes = [scope_of(instruction) for instruction in kernel.code]
        self.living: Mask = np.ones(self.num_lanes, bool)
        self._moved: Mask | None = None  # lanes that the current instruction sent elsewhere

    # ---- what instructions use --------------------------------------------------------------------------------------

    def lanes(self) -> npt.NDArray[np.int64]:
        """Active lanes' numbers."""
        return np.flatnonzero(self.mask)

    def put(self, name: str, value: npt.NDArray[Any]) -> None:
        """Write a register's active lanes. ``value`` [num_lanes]; narrower integers are extended by their sign."""
        if name == "_":
            return
        register = self.registers[name]
        if register.dtype != np.bool_ and value.dtype != np.bool_:
            if value.itemsize == register.itemsize:
                value = value.view(register.dtype)
            elif value.dtype.kind == "f":
                raise Unsupported(f"{value.dtype} into {name}")
            else:
                value = value.astype(register.dtype)
        if self.full:
            np.copyto(register, value)
        else:
            np.copyto(register, value, where=self.mask)

    def branch(self, target: str, lanes: Mask) -> None:
        self._send(self.kernel.labels[target], lanes)
        self._moved = lanes if self._moved is None else self._moved | lanes

    def leave(self, lanes: Mask) -> None:
        """The threads end."""
        self.living = self.living & ~lanes
        self._alive -= int(lanes.sum())
        self._moved = lanes if self._moved is None else self._moved | lanes

    def whole_warps(self, where: str) -> Mask:
        """[warps] which warps run this instruction; an error where only a part of one does."""
        warps = self.mask.reshape(-1, 32)
        some: Mask = np.any(warps, axis=1)
        every: Mask = np.all(warps, axis=1)
        if (some != every).any():
            at = int(np.flatnonzero(some != every)[0]) * 32
            raise self.error("not all lanes of a warp reach a .sync instruction", at, where)
        return some

    def error(self, what: str, lane: int | np.integer[Any], where: str) -> PtxError:
        block, thread = divmod(int(lane), self.block_size)
        return PtxError(f"{self.kernel.name}: {what}: block {block} thread {thread}: {where}")

    def raise_race(self, race: tuple[int, int] | None, space: str, where: str) -> None:
        if race is not None:
            block, thread = divmod(race[1], self.block_size)
            raise self.error(f"data race in {space} memory with block {block} thread {thread}", race[0], where)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _send(self, at: int, lanes: Mask) -> None:
        waiting = self._groups.get(at)
        self._groups[at] = lanes if waiting is None else waiting | lanes

    def _meet(self, at: int, group: Mask) -> Mask:
        """The lanes that may run instruction ``at`` now, those parked there before included; the others are parked."""
        parked = self._parked.pop(at, None)
        if parked is not None:
            group = group | parked
        if at in self._forced:
            self._forced.discard(at)
            return group
        size = 32 if self._scopes[at] == "warp" else self.block_size
        here, living = group.reshape(-1, size), self.living.reshape(-1, size)
        ready = np.repeat((here == living).all(axis=1), size) & group
        if (ready != group).any():
            self._parked[at] = group & ~ready
        return ready

    def _let_go(self) -> None:
        """Only parked lanes are left. Threads that ended may have completed a block; a warp runs with who came."""
        for at in sorted(self._parked):
            here = self._parked[at].reshape(-1, self.block_size)
            if self._scopes[at] == "warp":
                self._forced.add(at)
            elif not (here.any(axis=1) & (here == self.living.reshape(-1, self.block_size)).all(axis=1)).any():
                continue
            self._send(at, self._parked.pop(at))
            return
        at = min(self._parked)
        lane = int(np.argmax(self._parked[at]))
        raise self.error("not all threads of the block reach the barrier", lane, self.kernel.code[at].where)

    def run(self, max_steps: int = 5_000_000) -> int:
        """-> instructions executed (each for many lanes at once)."""
        code, actions, registers = self.kernel.code, self._actions, self.registers
        self._groups = {0: np.ones(self.num_lanes, bool)}
        with np.errstate(all="ignore"):
            while self._groups or self._parked:
                if not self._groups:
                    self._let_go()
                at = min(self._groups)
                group = self._groups.pop(at)
                active = int(group.sum())
                while True:  # straight ahead: every other group waits further on
                    if at >= len(code):
                        self.leave(group)
                        self._moved = None
                        break
                    if self._scopes[at] and active != self._alive:
                        group = self._meet(at, group)
                        active = int(group.sum())
                        if not active:
                            break
                    self.stamp += 1
                    if self.stamp > max_steps:
                        raise PtxError(f"{self.kernel.name}: no end after {max_steps} steps")
                    instruction = code[at]
                    guard = instruction.predicate
                    if guard is None:
                        self.mask, self.full = group, active == self._alive
                        actions[at](self)
                    else:
                        chosen = registers[guard.name]
                        self.mask = group & (~chosen if guard.negated else chosen)
                        self.full = False
                        if self.mask.any():
                            actions[at](self)
                    at += 1
                    if self._moved is not None:
                        group = group & ~self._moved
                        self._moved = None
                        active = int(group.sum())
                        if active:
                            self._send(at, group)
                        break
                    if at in self._groups:
                        group = group | self._groups.pop(at)
                        active = int(group.sum())
        self.copies.check_finished()
        return self.stamp


def _special_registers(
    lanes: npt.NDArray[np.int64], grid: tuple[int, int, int], block: tuple[int, int, int]
) -> dict[str, npt.NDArray[Any]]:
    size = int(np.prod(block))
    thread, number = lanes % size, lanes // size
    special = {"%laneid": lanes % 32}
    for prefix, index, shape in (("%tid", thread, block), ("%ctaid", number, grid)):
        special[f"{prefix}.x"] = index % shape[0]
        special[f"{prefix}.y"] = index // shape[0] % shape[1]
        special[f"{prefix}.z"] = index // (shape[0] * shape[1])
    for prefix, shape in (("%ntid", block), ("%nctaid", grid)):
        for axis, count in zip("xyz", shape, strict=True):
            special[f"{prefix}.{axis}"] = np.full(len(lanes), count)
    return {name: values.astype(np.uint32) for name, values in special.items()}


def _place_shared(kernel: Kernel, dynamic: int) -> tuple[dict[str, int], int]:
    """Offsets of the shared arrays, the dynamic one last, and the bytes of all."""
    symbols, offset = {}, 0
    for array in sorted(kernel.shared, key=lambda array: array.size == 0):
        offset = -(-offset // array.align) * array.align
        symbols[array.name] = offset
        offset += array.size or dynamic
    return symbols, offset
