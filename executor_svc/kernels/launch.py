"""The launch interface: ``launcher.kernel(name)(grid, block, args, smem)``, the same on every back end.

``CupyLauncher`` runs kernels on the device; the tests' PTX interpreter has the same interface. Callers hand tensors
for pointers and numpy scalars for values, and every launch is checked against the kernel's declaration (table.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from executor_svc.errors import DeviceUnavailable
from executor_svc.kernels.build import Image, arch_of, build
from executor_svc.kernels.signature import Argument, LaunchError, check_arguments, check_symbol
from executor_svc.kernels.table import Kernel, find_kernel

Dim = tuple[int, ...]
_MAX_GRID_YZ = 65535  # blocks; the first dimension has 31 bits
_DEFAULT_SMEM = 48 << 10  # bytes of dynamic shared memory a kernel gets without asking


class Launch(Protocol):
    def __call__(self, grid: Dim, block: Dim, args: Sequence[Argument], smem: int = 0) -> None:
        """``grid`` in blocks, ``block`` in threads (1 to 3 dimensions each), ``smem`` in bytes."""
        ...


class Launcher(Protocol):
    device: str  # "cuda", or "cpu" for the interpreter
    num_multiprocessors: int

    def kernel(self, name: str) -> Launch: ...


def check_launch(kernel: Kernel, grid: Dim, block: Dim, args: Sequence[Argument], smem: int, device: str) -> None:
    """What both back ends refuse alike, before anything runs."""
    threads = 1
    for size in block:
        threads *= size
    dimensions = 1 <= len(grid) <= 3 and 1 <= len(block) <= 3
    if not dimensions or min((*grid, *block)) < 1 or max((0, *grid[1:])) > _MAX_GRID_YZ:
        raise LaunchError(f"{kernel.name}: grid {grid}, block {block}")
    if threads != kernel.threads:
        raise LaunchError(f"{kernel.name}: {threads} threads a block, declared {kernel.threads}")
    if not 0 <= smem <= kernel.max_smem:
        raise LaunchError(f"{kernel.name}: {smem} bytes of shared memory, declared at most {kernel.max_smem}")
    check_arguments(kernel.name, kernel.parameters, args, device)


class _Stream:
    """The one thing that CuPy reads of a stream; its own wrapper of foreign streams warns at every use (14.0)."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class CupyLauncher:
    """Kernels on one CUDA device, on torch's current stream; works inside CUDA graph capture once loaded."""

    device = "cuda"

    def __init__(self, device_index: int = 0) -> None:
        self._cupy = importlib.import_module("cupy")
        self._driver = importlib.import_module("cupy_backends.cuda.api.driver")
        self._index = device_index
        self._arch = arch_of(torch.cuda.get_device_capability(device_index))
        self.num_multiprocessors = torch.cuda.get_device_properties(device_index).multi_processor_count
        self._launches: dict[str, Launch] = {}

    def kernel(self, name: str) -> Launch:
        """Built and loaded on first use: ask for all kernels before capturing a graph. DeviceUnavailable where the
        device has too little shared memory for it."""
        if name not in self._launches:
            self._launches[name] = self._load(find_kernel(name))
        return self._launches[name]

    def _load(self, kernel: Kernel) -> Launch:
        image = build(kernel.source, [kernel.name], self._arch)
        symbol = checked_symbol(kernel, image)
        with self._cupy.cuda.Device(self._index):
            module = self._cupy.cuda.function.Module()
            module.load(image.data)
            function = module.get_function(symbol)
            if kernel.max_smem > _DEFAULT_SMEM:
                runtime = self._cupy.cuda.runtime
                limit = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, self._index)
                if kernel.max_smem > limit:
                    raise DeviceUnavailable(
                        f"{kernel.name} needs {kernel.max_smem} bytes of shared memory a block, this GPU has {limit}"
                    )
                attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._driver.funcSetAttribute(function.ptr, attribute, kernel.max_smem)
                # So that two blocks fit a multiprocessor, whatever the driver would guess.
                carveout = self._driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                self._driver.funcSetAttribute(function.ptr, carveout, 100)  # percent

        def launch(grid: Dim, block: Dim, args: Sequence[Argument], smem: int = 0) -> None:
            check_launch(kernel, grid, block, args, smem, self.device)
            stream = _Stream(torch.cuda.current_stream(self._index).cuda_stream)
            function(grid, block, tuple(_pass(a) for a in args), shared_mem=smem, stream=stream)

        return launch


def checked_symbol(kernel: Kernel, image: Image) -> str:
    """The kernel's symbol in ``image``, after comparing its parameters with the declaration."""
    symbol = image.lowered[kernel.name]
    check_symbol(kernel.name, kernel.parameters, symbol)
    return symbol


def _pass(argument: Argument) -> Any:
    """Pointers as Python integers (8 bytes), values as the numpy scalars they are."""
    if argument is None:
        return 0
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
