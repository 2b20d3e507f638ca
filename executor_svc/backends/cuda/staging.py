"""Copies between host and device that neither waits for: through pinned buffers, each with its event.

A step's inputs are laid end to end and copied at once; so are its results on the way back. There is one buffer more
than steps can be in flight, so the wait before a buffer is used again is for a step that is long done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.backends.cuda.device import Device, Event

BUFFERS = 3  # the step that runs, the one held back by overlap, and one more
_ALIGN = 16  # bytes: the widest access of a kernel
_MOST_VIEWS = 1024  # kept; steps with prompts hardly ever have the same shapes
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.uint64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}

Array = npt.NDArray[Any]


@dataclass(slots=True, frozen=True)
class _Buffer:
    tensor: torch.Tensor  # pinned uint8
    bytes: memoryview  # the same memory
    event: Event  # after the last copy


class _Ring:
    """Pinned buffers in turn."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._turn = 0
        self.resize(size)

    def resize(self, size: int) -> None:
        for buffer in getattr(self, "_buffers", ()):
            buffer.event.wait()  # before its memory goes
        self.size = size
        self._buffers = []
        for _ in range(BUFFERS):
            tensor = self._device.pinned(max(size, _ALIGN))
            self._buffers.append(_Buffer(tensor, tensor.numpy().data, self._device.event()))

    def take(self) -> _Buffer:
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        buffer.event.wait()
        return buffer


class Staging:
    """To the device, always to the same addresses: those of arrays depend only on the sizes of the ones before."""

    def __init__(self, device: Device, size: int) -> None:
        """``size`` in bytes: more is taken when it is needed, and the addresses change then."""
        self._device = device
        self._ring = _Ring(device, size)
        self._target = self._on_device(size)
        self._views: dict[tuple[int, str, tuple[int, ...]], torch.Tensor] = {}

    def _on_device(self, size: int) -> torch.Tensor:
        return torch.empty(max(size, _ALIGN), dtype=torch.uint8, device=self._device.launcher.device)

    @property
    def size(self) -> int:
        return self._ring.size

    @property
    def address(self) -> int:
        """Of the arrays on the device."""
        return self._target.data_ptr()

    def upload(self, arrays: Sequence[Array], open_end: bool = False) -> list[torch.Tensor]:
        """The same arrays on the device; they stand until the next call. ``open_end``: the last, of one column, reaches
        to the buffer's end, so that a longer one may stand there later."""
        places, end = _places([array.nbytes for array in arrays])
        if end > self.size:
            self._ring.resize(2 * end)
            self._target = self._on_device(2 * end)
            self._views.clear()
        buffer = self._ring.take()
        for array, at in zip(arrays, places, strict=True):
            if size := array.nbytes:
                buffer.bytes[at : at + size] = np.ascontiguousarray(array).data.cast("B")
        if end:
            self._target[:end].copy_(buffer.tensor[:end], non_blocking=True)
        buffer.event.record()
        found = [self._view(array, at) for array, at in zip(arrays, places, strict=True)]
        if open_end:
            rest = self._target[places[-1] : self.size // _ALIGN * _ALIGN]
            found[-1] = rest.view(found[-1].dtype).view(-1, 1)
        return found

    def _view(self, array: Array, at: int) -> torch.Tensor:
        """``array``'s place on the device. Decode steps of one size have the same ones: making a view costs more than
        everything else here."""
        key = (at, array.dtype.char, array.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            view = self._target[at : at + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            self._views[key] = view
        return view


class Landing:
    """Results on their way to the host."""

    def __init__(self, buffer: _Buffer, places: list[int], tensors: Sequence[torch.Tensor]) -> None:
        self._buffer = buffer
        self._parts = [
            (at, t.numel() * t.element_size(), t.dtype, tuple(t.shape)) for at, t in zip(places, tensors, strict=True)
        ]

    def ready(self) -> bool:
        """True when ``wait`` would not wait."""
        return self._buffer.event.query()

    def wait(self) -> list[Array]:
        """Waits for the event and gives copies, which stay."""
        self._buffer.event.wait()
        return [
            self._buffer.tensor[at : at + size].view(dtype).view(shape).numpy().copy()
            for at, size, dtype, shape in self._parts
        ]


class Readback:
    """From the device. A landing must be waited for before ``BUFFERS`` further ones are asked for."""

    def __init__(self, device: Device, size: int) -> None:
        self._ring = _Ring(device, size)

    def copy(self, tensors: Sequence[torch.Tensor]) -> Landing:
        """Starts the copies; ``tensors`` are contiguous."""
        places, end = _places([tensor.numel() * tensor.element_size() for tensor in tensors])
        if end > self._ring.size:
            self._ring.resize(2 * end)
        buffer = self._ring.take()
        for tensor, at in zip(tensors, places, strict=True):
            if size := tensor.numel() * tensor.element_size():
                buffer.tensor[at : at + size].copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
        buffer.event.record()
        return Landing(buffer, places, tensors)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each begins, and the end of all, in bytes."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return places, end
