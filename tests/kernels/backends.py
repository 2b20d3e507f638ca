"""Where the kernel tests run: in the interpreter, or with ``--kernels gpu`` on a device, the tests unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_svc.backends.cuda.device import CudaDevice, Device
from executor_svc.kernels.launch import CupyLauncher, Dim, Launch, Launcher
from executor_svc.kernels.signature import Argument
from executor_svc.kernels.table import find_kernel
from tests.kernels.ptx.launcher import PtxLauncher
from tests.kernels.stand_in import StandIn

_on_device = False


def use_device(wanted: bool) -> None:
    global _on_device
    _on_device = wanted


def on_device() -> bool:
    return _on_device


def make_launcher(check_races: bool = True) -> Launcher:
    """For tests that hold their tensors on the host."""
    return MirrorLauncher(CupyLauncher()) if _on_device else PtxLauncher(check_races)


def make_device(check_races: bool = False) -> Device:
    """For tests that hold their tensors where the kernels run."""
    return CudaDevice() if _on_device else StandIn(PtxLauncher(check_races))


_LARGE, _TAIL = 1 << 30, 64 << 20  # bytes


def _used(tensor: torch.Tensor) -> torch.Tensor:
    """Of a large tensor its end alone: tests of offsets beyond 31 bits use nothing else, and the host's pages before it
    were never touched."""
    flat = tensor.reshape(-1)
    return flat[-_TAIL // tensor.element_size() :] if tensor.nbytes > _LARGE else flat


class MirrorLauncher:
    """Launches on ``inner``'s device with copies of the host tensors, and copies back what the kernel may write."""

    device = "cpu"

    def __init__(self, inner: Launcher) -> None:
        self._inner = inner
        self.num_multiprocessors = inner.num_multiprocessors

    def kernel(self, name: str) -> Launch:
        run, declared = self._inner.kernel(name), find_kernel(name)

        def launch(grid: Dim, block: Dim, args: Sequence[Argument], smem: int = 0) -> None:
            copies = [self._copied(a) if isinstance(a, torch.Tensor) else a for a in args]
            run(grid, block, copies, smem)
            for parameter, mine, theirs in zip(declared.parameters, args, copies, strict=True):
                if not parameter.const and isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
                    _used(mine).copy_(_used(theirs))

        return launch

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._inner.device)
        _used(copy).copy_(_used(tensor))
        return copy
