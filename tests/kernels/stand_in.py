"""A device that is none: host memory for its own, kernels through the interpreter, and graphs that are tapes.

It keeps to what a device allows. A captured graph replays the very operations and addresses that ran at capture, so a
value that the host put into one of them does not change later. ``NoHostReads`` refuses what would make the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.backends.cuda.device import Event, Memory
from executor_svc.kernels.launch import Dim, Launch, Launcher
from executor_svc.kernels.signature import Argument

Step = Callable[[], None]
PATIENCE = 100  # queries that find a late device at work


class LateEvent:
    """Of a device that is always late: what was asked of it is done once somebody waits for it, or has asked for it
    often."""

    def __init__(self, device: StandIn) -> None:
        self._device = device
        self._after = 0  # calls at the last record
        self._queries = 0

    def record(self) -> None:
        self._after, self._queries = len(self._device.calls), 0

    def query(self) -> bool:
        self._queries += 1
        if self._queries > PATIENCE:
            self._device.done = max(self._device.done, self._after)
        return self._after <= self._device.done

    def wait(self) -> None:
        if self._after > self._device.done:
            self._device.done = self._after
            self._device.calls.append("wait")


class StandIn:
    """Implements ``Device``."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher: Launcher = _TapedLauncher(launcher, self)
        self.tape: list[Step] | None = None
        self.calls: list[str] = []  # in order: kernels' names, "replay" of a graph, and each "wait" that had to wait
        self.done = 0  # calls
        self.pools: list[Any] = []  # of each capture
        self.replays = 0
        self.pinned_bytes = 0
        self.broken = False  # set by tests

    def pinned(self, size: int) -> torch.Tensor:
        self.pinned_bytes += size
        buffer = torch.empty(size, dtype=torch.uint8)
        _pinned.add(buffer.data_ptr())
        return buffer

    def event(self) -> Event:
        return LateEvent(self)

    def graph_pool(self) -> Any:
        return object()

    def capture(self, run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        tape: list[Step] = []
        self.pools.append(pool)
        self.tape = tape
        try:
            with _Tape(tape):
                run()
        finally:
            self.tape = None

        @torch.inference_mode()
        def replay() -> None:
            self.replays += 1
            self.calls.append("replay")
            for step in tape:
                step()

        return replay

    def memory(self) -> Memory:
        return Memory(free=1 << 30, total=1 << 30)

    def measure(self, run: Callable[[], None]) -> int:
        run()
        return 1 << 20

    def usable(self) -> bool:
        return not self.broken

    def description(self) -> str:
        return "a stand-in"


class _TapedLauncher:
    def __init__(self, inner: Launcher, owner: StandIn) -> None:
        self._inner, self._owner = inner, owner
        self.device, self.num_multiprocessors = inner.device, inner.num_multiprocessors

    def kernel(self, name: str) -> Launch:
        run = self._inner.kernel(name)

        def launch(grid: Dim, block: Dim, args: Sequence[Argument], smem: int = 0) -> None:
            def step() -> None:
                with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                    run(grid, block, args, smem)

            if self._owner.tape is not None:
                self._owner.tape.append(step)
            self._owner.calls.append(name)
            step()

        return launch


class _Tape(TorchDispatchMode):
    """Keeps every operation with the tensors it took and gave."""

    def __init__(self, tape: list[Step]) -> None:
        super().__init__()
        self._steps = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        fresh = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in inputs]

        def step() -> None:
            again = _tensors(func(*args, **kwargs))
            for kept, value in zip(fresh, again if fresh else (), strict=True):
                kept.copy_(value)

        if "empty" not in str(func):
            self._steps.append(step)
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in _tensors(part)] if isinstance(value, list | tuple) else []


_pinned: set[int] = set()  # addresses of host memory


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.is_pinned() if torch.cuda.is_available() else tensor.data_ptr() in _pinned


class HostRead(RuntimeError):
    """The host wanted to know a value of the device, or copied without a pinned buffer: it would wait."""


_READS = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "nonzero",
    "cpu", "cuda", "equal", "allclose", "masked_select", "unique", "argwhere", "is_nonzero",
    "bincount", "histc", "tensor", "as_tensor", "repeat_interleave",
}  # fmt: skip
_WAITING_OPS = (
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique", "unique_dim", "bincount",
    "repeat_interleave",
)  # fmt: skip


class _FunctionGuard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _READS and not (name == "numpy" and _is_pinned(args[0])):
            raise HostRead(f"torch.{name} reads or copies values on the host")
        if name == "to" and any(isinstance(value, torch.device | str) for value in (*args[1:], *kwargs.values())):
            raise HostRead("Tensor.to between devices waits; use pinned buffers")
        return func(*args, **kwargs)


class _DispatchGuard(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(_WAITING_OPS):
            raise HostRead(f"aten.{name} waits for the device")
        masks = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(isinstance(mask, torch.Tensor) and mask.dtype in (torch.bool, torch.uint8) for mask in masks):
            raise HostRead(f"aten.{name} with a mask waits for the device")
        return func(*args, **(kwargs or {}))


def _refuse_numpy(array: Any) -> torch.Tensor:
    raise HostRead("torch.from_numpy: what comes from the host comes through pinned buffers")


class NoHostReads:
    """``with NoHostReads():`` nothing may read a tensor's values on the host. Kernels may: they are the device.

    On a GPU torch's own guard stands beside it: an operation that synchronises is an error."""

    def __enter__(self) -> None:
        self._modes = [_DispatchGuard(), _FunctionGuard()]
        for mode in self._modes:
            mode.__enter__()
        self._from_numpy, torch.from_numpy = torch.from_numpy, _refuse_numpy  # no mode sees that one
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *error: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        torch.from_numpy = self._from_numpy
        for mode in reversed(self._modes):
            mode.__exit__(*error)
