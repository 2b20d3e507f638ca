"""One CUDA device, as far as the executor uses it beside tensors and kernels: pinned memory, events, graphs, sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from executor_svc.errors import DeviceUnavailable
from executor_svc.kernels.launch import CupyLauncher, Launcher


class Event(Protocol):
    """A point in the device's order of work."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """True when a wait would return at once."""
        ...

    def wait(self) -> None:
        """The host waits for the last record; returns at once if there was none."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device: ``free`` for everybody, ``total``."""

    free: int
    total: int


class Device(Protocol):
    """Everything runs in the order in which it was asked for, on one stream."""

    launcher: Launcher  # its ``device`` is where tensors live

    def pinned(self, size: int) -> torch.Tensor:
        """uint8 [size] on the host, which the device copies from and to without the host."""
        ...

    def event(self) -> Event: ...

    def graph_pool(self) -> Any:
        """Memory that graphs share which never run at once. Of one set of graphs: torch takes no further graph into a
        pool whose graphs are all gone."""
        ...

    def capture(self, run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        """What ``run`` asks of the device, to be asked again by the returned call: the same kernels with the same
        addresses and values. ``run`` must have run once before. ``pool``: of ``graph_pool``, by default its own."""
        ...

    def memory(self) -> Memory: ...

    def measure(self, run: Callable[[], None]) -> int:
        """Bytes that ``run`` holds at once at most, beyond what was held before."""
        ...

    def usable(self) -> bool:
        """False after an error that the process cannot go on from: every later call fails, too."""
        ...

    def description(self) -> str:
        """The device and the versions that decide its results."""
        ...


class CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        if not self._event.query():
            self._event.synchronize()


class CudaDevice:
    """Makes a stream of its own the current one of this thread: the default stream waits for others by itself."""

    def __init__(self, index: int = 0) -> None:
        torch.cuda.set_device(index)
        torch.set_float32_matmul_precision("highest")  # float32 is float32, not TF32
        for half in ("fp16", "bf16"):  # sums are float32 where a product is split over K, too
            setattr(torch.backends.cuda.matmul, f"allow_{half}_reduced_precision_reduction", False)
        self._index = index
        self._stream = torch.cuda.Stream(index)
        torch.cuda.set_stream(self._stream)
        self.launcher: Launcher = CupyLauncher(index)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        return CudaEvent()

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: Any = None) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # On our own stream: the workspaces of the matrix products belong to a stream, and this one's are there already.
        # In inference mode always, as the steps: the state that torch keeps for all graphs is made in the first one's.
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool, stream=self._stream):
            run()

        @torch.inference_mode()
        def replay() -> None:
            graph.replay()

        return replay

    def memory(self) -> Memory:
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._index)
        return Memory(free, total)

    def measure(self, run: Callable[[], None]) -> int:
        before = self.memory()
        torch.cuda.reset_peak_memory_stats(self._index)
        held = torch.cuda.memory_reserved(self._index)
        run()
        torch.cuda.synchronize(self._index)
        taken = torch.cuda.max_memory_reserved(self._index) - held
        # What is not torch's (kernel images, workspaces of libraries) stays, and shows in the device's own figure.
        return max(taken, before.free - torch.cuda.mem_get_info(self._index)[0])

    def usable(self) -> bool:
        try:
            torch.cuda.synchronize(self._index)
        except RuntimeError:
            return False
        return True

    def description(self) -> str:
        major, minor = torch.cuda.get_device_capability(self._index)
        name = torch.cuda.get_device_name(self._index)
        return f"{name} sm_{major}{minor} torch {torch.__version__} cuda {torch.version.cuda}"


def open_device() -> CudaDevice:
    """The first CUDA device. Raises DeviceUnavailable."""
    from executor_svc.kernels import nvrtc

    if not torch.cuda.is_available():
        raise DeviceUnavailable("no usable NVIDIA GPU here (torch sees none)")
    try:
        nvrtc.version()
        return CudaDevice()
    except nvrtc.NvrtcUnavailable as error:
        raise DeviceUnavailable(f"{error}; install the extra stepwire[gpu]") from error
    except ImportError as error:
        raise DeviceUnavailable(f"cupy cannot be used ({error}); install the extra stepwire[gpu]") from error
    except (ValueError, RuntimeError) as error:
        raise DeviceUnavailable((str(error) or type(error).__name__).splitlines()[0]) from error
