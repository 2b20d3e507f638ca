"""The interpreter behind the launch interface of executor_svc/kernels/launch.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from executor_svc.kernels.build import build
from executor_svc.kernels.launch import Dim, Launch, check_launch, checked_symbol
from executor_svc.kernels.signature import Argument
from executor_svc.kernels.table import Kernel as Declared
from executor_svc.kernels.table import find_kernel
from tests.kernels.ptx.machine import Action, Machine, compile_kernel
from tests.kernels.ptx.parse import Kernel, parse_module
from tests.kernels.ptx.stats import Stats

ARCH = "compute_90"


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory as uint8."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)


@cache
def _load(name: str) -> tuple[Kernel, list[Action]]:
    return load_kernel(find_kernel(name), {})


def load_kernel(declared: Declared, overrides: dict[str, str]) -> tuple[Kernel, list[Action]]:
    image = build(declared.source, [declared.name], ARCH, overrides=overrides)
    symbol = checked_symbol(declared, image)
    kernel = parse_module(image.data.decode())[symbol]
    return kernel, compile_kernel(kernel)


def launch(
    kernel: Kernel,
    actions: list[Action],
    declared: Declared,
    grid: Dim,
    block: Dim,
    args: Sequence[Argument],
    smem: int,
    check_races: bool,
    stats: Stats | None,
) -> int:
    """Run once on host tensors. -> steps"""
    machine = Machine(kernel, actions, _three(grid), _three(block), smem, check_races, stats)
    for index, (parameter, argument) in enumerate(zip(declared.parameters, args, strict=True)):
        name = kernel.parameters[index][0]
        if argument is None:
            machine.arguments[name] = np.uint64(0)
        elif isinstance(argument, torch.Tensor):
            machine.arguments[name] = np.uint64(machine.globals.add(tensor_bytes(argument), not parameter.const, index))
        else:
            machine.arguments[name] = argument
    return machine.run()


def _three(dims: Dim) -> tuple[int, int, int]:
    x, y, z = (*dims, 1, 1)[:3]
    return x, y, z


class PtxLauncher:
    """``check_races=False`` for larger shapes; ``collect`` keeps counters of each launch in ``stats``; ``overrides``
    replaces source files, to plant bugs."""

    device = "cpu"
    num_multiprocessors = 4

    def __init__(
        self, check_races: bool = True, collect: bool = False, overrides: dict[str, str] | None = None
    ) -> None:
        self._check_races, self._collect, self._overrides = check_races, collect, overrides or {}
        self.stats: dict[str, Stats] = {}

    def kernel(self, name: str) -> Launch:
        declared = find_kernel(name)

        @cache
        def load() -> tuple[Kernel, list[Action]]:  # at the first launch: few kernels that are asked for run
            concerned = any(file == declared.source or file.endswith(".cuh") for file in self._overrides)
            return load_kernel(declared, self._overrides) if concerned else _load(name)

        def run(grid: Dim, block: Dim, args: Sequence[Argument], smem: int = 0) -> None:
            kernel, actions = load()
            check_launch(declared, grid, block, args, smem, self.device)
            stats = self.stats.setdefault(name, Stats()) if self._collect else None
            launch(kernel, actions, declared, grid, block, args, smem, self._check_races, stats)

        return run
