"""Global memory (one range for each tensor argument) and shared memory (one for each block), with their checks."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.races import Shadow

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Machine

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

SHARED_WINDOW = 1 << 60  # where shared memory begins among generic addresses
_GAP = 1 << 20  # bytes between ranges: an index that runs over hits nothing
_PAGE_BITS = 10  # granules of a page of the shadow


class Range:
    """One tensor: ``data`` is its bytes. Written ranges have a shadow, made page by page where they are touched."""

    def __init__(self, base: int, data: Bytes, writable: bool, parameter: int) -> None:
        self.base, self.data, self.writable, self.parameter = base, data, writable, parameter
        self.end = base + data.size
        self._shadow: Shadow | None = None
        self._pages: npt.NDArray[np.int32] | None = None
        self._used = 0

    def shadow_places(self, offsets: Int64, machine: Machine) -> tuple[Shadow, Int64]:
        """Granule numbers inside the shadow for byte offsets."""
        granule = machine.global_granule
        granules = offsets // granule
        if self._shadow is None or self._pages is None:
            self._shadow = Shadow(0, machine.threads)
            self._pages = np.full((self.data.size // granule >> _PAGE_BITS) + 1, -1, np.int32)
        pages = granules >> _PAGE_BITS
        missing = np.unique(pages[self._pages[pages] < 0])
        if len(missing):
            self._pages[missing] = self._used + np.arange(len(missing))
            self._used += len(missing)
            self._shadow.grow(self._used << _PAGE_BITS)
        return self._shadow, (self._pages[pages].astype(np.int64) << _PAGE_BITS) + (granules & (1 << _PAGE_BITS) - 1)


def gather(data: Bytes, offsets: Int64, width: int) -> Bytes:
    """[n] offsets -> uint8 [n, width]; as wide elements where the alignment allows."""
    if width > 1 and not (offsets % width).any() and not data.ctypes.data % min(width, 8):
        step = min(width, 8)
        kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[step]
        elements = data[: data.size // step * step].view(kind)
        if width == 16:
            at = offsets >> 3
            return np.stack([elements[at], elements[at + 1]], axis=1).view(np.uint8)
        return elements[offsets // step].view(np.uint8).reshape(-1, width)
    return data[offsets[:, None] + np.arange(width)]


def scatter(data: Bytes, offsets: Int64, values: Bytes) -> None:
    data[offsets[:, None] + np.arange(values.shape[1])] = values


def expand(starts: Int64, lanes: Int64, width: int, granule: int) -> tuple[Int64, Int64]:
    """Byte offsets -> (offsets of each granule of the access, its lane), flat."""
    count = width // granule
    if count == 1:
        return starts, lanes
    return (starts[:, None] + np.arange(count) * granule).ravel(), np.repeat(lanes, count)


class GlobalMemory:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._ranges: list[Range] = []
        self._bases: list[int] = []
        self._next = 1 << 32

    def add(self, data: Bytes, writable: bool, parameter: int) -> int:
        """A tensor's bytes become visible at the returned address, aligned as they are in host memory."""
        base = self._next + data.ctypes.data % 16 if data.size else self._next
        self._ranges.append(Range(base, data, writable, parameter))
        self._bases.append(base)
        self._next = (base + data.size + _GAP + 255) & ~255
        return base

    def _split(
        self, addresses: Int64, lanes: Int64, width: int, write: bool, where: str
    ) -> list[tuple[Range, npt.NDArray[np.bool_]]]:
        """The ranges that are hit, each with the accesses (a boolean mask) that lie in it."""
        if (addresses % width).any():
            bad = int(np.flatnonzero(addresses % width)[0])
            raise self._machine.error("misaligned global access", lanes[bad], where)
        parts = []
        left = np.ones(len(addresses), bool)
        while left.any():
            at = int(np.argmax(left))
            index = bisect_right(self._bases, int(addresses[at])) - 1
            found = self._ranges[index] if index >= 0 else None
            if found is None or addresses[at] + width > found.end:
                raise self._machine.error("global access out of bounds", lanes[at], where)
            if write and not found.writable:
                raise self._machine.error("write through a const pointer", lanes[at], where)
            hit = left & (addresses >= found.base) & (addresses < found.end)
            over = hit & (addresses + width > found.end)
            if over.any():
                raise self._machine.error("global access out of bounds", lanes[int(np.argmax(over))], where)
            parts.append((found, hit))
            left &= ~hit
        return parts

    def load(self, addresses: Int64, lanes: Int64, width: int, where: str, atomic: bool = False) -> Bytes:
        """-> uint8 [n, width]"""
        machine = self._machine
        out = np.empty((len(addresses), width), np.uint8)
        for found, hit in self._split(addresses, lanes, width, False, where):
            offsets = addresses[hit] - found.base
            out[hit] = gather(found.data, offsets, width)
            if machine.stats:
                loaded = machine.stats.loaded
                loaded[found.parameter] = loaded.get(found.parameter, 0) + len(offsets) * width
            if machine.check_races and found.writable and not atomic:
                places, who = expand(offsets, lanes[hit], width, machine.global_granule)
                shadow, places = found.shadow_places(places, machine)
                machine.raise_race(shadow.read(places, who, machine.stamp), "global", where)
        if machine.stats and not atomic:
            machine.stats.count(where, "global", "load", addresses, lanes, width)
        return out

    def store(self, addresses: Int64, lanes: Int64, values: Bytes, where: str, atomic: bool = False) -> None:
        machine = self._machine
        width = values.shape[1]
        for found, hit in self._split(addresses, lanes, width, True, where):
            offsets = addresses[hit] - found.base
            if machine.check_races:
                places, who = expand(offsets, lanes[hit], width, machine.global_granule)
                shadow, places = found.shadow_places(places, machine)
                machine.raise_race(shadow.write(places, who, machine.stamp, atomic), "global", where)
            scatter(found.data, offsets, values[hit])
        if machine.stats:
            machine.stats.count(where, "global", "atomic" if atomic else "store", addresses, lanes, width)


class SharedMemory:
    """Every block's shared memory, one after the other, filled with a pattern that no kernel should ever see."""

    def __init__(self, machine: Machine, size: int) -> None:
        self._machine = machine
        self.size = size  # bytes of one block
        self._stride = (size + 15) & ~15
        self._data = np.full(machine.num_blocks * self._stride, 0xFF, np.uint8)
        granule = machine.shared_granule
        self._written = np.zeros(self._data.size // granule, bool)
        self._shadow = Shadow(self._written.size if machine.check_races else 0, machine.threads)

    def _offsets(self, addresses: Int64, lanes: Int64, width: int, where: str) -> Int64:
        misaligned = addresses % width != 0
        if misaligned.any():
            raise self._machine.error("misaligned shared access", lanes[int(np.argmax(misaligned))], where)
        outside = (addresses < 0) | (addresses + width > self.size)
        if outside.any():
            raise self._machine.error("shared access out of bounds", lanes[int(np.argmax(outside))], where)
        return addresses + self._machine.threads.block[lanes] * np.int64(self._stride)

    def load(self, addresses: Int64, lanes: Int64, width: int, where: str, atomic: bool = False) -> Bytes:
        machine = self._machine
        offsets = self._offsets(addresses, lanes, width, where)
        places, who = expand(offsets, lanes, width, machine.shared_granule)
        places = places // machine.shared_granule
        unwritten = ~self._written[places]
        if unwritten.any():
            raise machine.error("shared memory is read before it is written", who[int(np.argmax(unwritten))], where)
        if machine.check_races and not atomic:
            machine.raise_race(self._shadow.read(places, who, machine.stamp), "shared", where)
        if machine.stats and not atomic:
            machine.stats.count(where, "shared", "load", addresses, lanes, width)
        return gather(self._data, offsets, width)

    def store(self, addresses: Int64, lanes: Int64, values: Bytes, where: str, atomic: bool = False) -> None:
        machine = self._machine
        offsets = self._mark(addresses, lanes, values.shape[1], where, True, atomic)
        scatter(self._data, offsets, values)
        if machine.stats:
            kind = "atomic" if atomic else "store"
            machine.stats.count(where, "shared", kind, addresses, lanes, values.shape[1])

    def invalidate(self, addresses: Int64, lanes: Int64, width: int, where: str) -> None:
        """An asynchronous write has been issued: the old bytes are gone, the new ones not there yet."""
        self._mark(addresses, lanes, width, where, False, False)

    def _mark(self, addresses: Int64, lanes: Int64, width: int, where: str, written: bool, atomic: bool) -> Int64:
        machine = self._machine
        offsets = self._offsets(addresses, lanes, width, where)
        places, who = expand(offsets, lanes, width, machine.shared_granule)
        places = places // machine.shared_granule
        if machine.check_races:
            machine.raise_race(self._shadow.write(places, who, machine.stamp, atomic), "shared", where)
        self._written[places] = written
        return offsets
