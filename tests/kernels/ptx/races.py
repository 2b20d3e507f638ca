"""Data races, found by what orders two accesses and not by when they happened to run.

Two accesses to one place, not both reads, by different threads, are ordered only by a barrier of their block between
them, or by a ``bar.warp.sync`` of their warp. Shuffles and votes order nothing. Threads of different blocks are never
ordered within a launch. Every instruction has a stamp; a block and a warp know the stamp of their last barrier:

    an earlier access by another thread is ordered before this one  <=>  its stamp < that barrier's stamp

For each granule (the narrowest access of the kernel) the last write is kept, and of the reads: the last one, the last
by another thread of that warp, and the last by another warp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NEVER = np.int32(2**31 - 1)  # the stamp of a read by another block: no barrier is later

Index = npt.NDArray[np.int64]
Lane = npt.NDArray[np.int32]


@dataclass(slots=True)
class Threads:
    """Who is who, and when each last met a barrier."""

    block: npt.NDArray[np.int32]  # [N] block of each lane
    block_barrier: npt.NDArray[np.int32]  # [blocks] stamps
    warp_barrier: npt.NDArray[np.int32]  # [warps] stamps


class Shadow:
    """Last accesses of ``size`` granules. Lanes are stored plus one; 0 is nobody."""

    _ARRAYS = (
        "_writer", "_write_stamp", "_atomic", "_reader", "_read_stamp", "_read_same_warp", "_read_elsewhere",
    )  # fmt: skip

    def __init__(self, size: int, threads: Threads) -> None:
        self._threads = threads
        self._writer, self._write_stamp, self._reader, self._read_stamp, self._read_same_warp, self._read_elsewhere = (
            np.zeros(size, np.int32) for _ in range(6)
        )
        self._atomic = np.zeros(size, bool)

    def grow(self, size: int) -> None:
        for name in self._ARRAYS:
            old = getattr(self, name)
            new = np.zeros(size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    def read(self, places: Index, lanes: Index, stamp: int) -> tuple[int, int] | None:
        """``places`` [n] granules read by ``lanes`` [n]. -> (lane, other lane) of a race, or None."""
        me = (lanes + 1).astype(np.int32)
        writer = self._writer[places]
        race = self._unordered(writer, self._write_stamp[places], me)
        if race.any():
            return _first(race, lanes, writer)
        reader, stamps = self._reader[places], self._read_stamp[places]
        same_warp = self._warp(reader) == self._warp(me)
        other = (reader > 0) & (reader != me)
        inside = self._read_same_warp[places]
        outside = self._read_elsewhere[places]
        outside = np.where(other & ~same_warp, np.maximum(outside, np.maximum(stamps, inside)), outside)
        outside = np.where(other & (self._block(reader) != self._block(me)), NEVER, outside)
        inside = np.where(other, np.where(same_warp, np.maximum(inside, stamps), 0), inside)
        self._reader[places] = me
        self._read_stamp[places] = stamp
        self._read_same_warp[places] = inside
        self._read_elsewhere[places] = outside
        winner = self._reader[places]  # of several lanes that read one place now, one is kept
        lost = winner != me
        if lost.any():
            together = self._warp(winner) == self._warp(me)
            self._read_same_warp[places[lost & together]] = stamp
            self._read_elsewhere[places[lost & ~together]] = stamp
            self._read_elsewhere[places[lost & (self._block(winner) != self._block(me))]] = NEVER
        return None

    def write(self, places: Index, lanes: Index, stamp: int, atomic: bool = False) -> tuple[int, int] | None:
        """As ``read``. Atomic operations do not race with each other."""
        me = (lanes + 1).astype(np.int32)
        writer = self._writer[places]
        race = self._unordered(writer, self._write_stamp[places], me)
        if atomic:
            race &= ~self._atomic[places]
        if race.any():
            return _first(race, lanes, writer)
        reader = self._reader[places]
        race = self._unordered(reader, self._read_stamp[places], me)
        block_barrier = self._threads.block_barrier[self._block(me)]
        warp_barrier = np.where(self._warp(reader) == self._warp(me), self._threads.warp_barrier[self._warp(me)], 0)
        race |= self._read_same_warp[places] > np.maximum(np.maximum(block_barrier, warp_barrier) - 1, 0)
        race |= self._read_elsewhere[places] > np.maximum(block_barrier - 1, 0)
        if race.any():
            return _first(race, lanes, reader)
        self._writer[places] = me
        self._write_stamp[places] = stamp
        self._atomic[places] = atomic
        if not atomic:
            clash = self._writer[places] != me
            if clash.any():
                return _first(clash, lanes, self._writer[places])
        return None

    def _unordered(self, other: Lane, stamp: Lane, me: Lane) -> npt.NDArray[np.bool_]:
        ordered = stamp < self._threads.block_barrier[self._block(me)]
        warps = self._warp(me)
        ordered |= (self._warp(other) == warps) & (stamp < self._threads.warp_barrier[warps])
        ordered &= self._block(other) == self._block(me)
        return (other > 0) & (other != me) & ~ordered

    def _block(self, one_based: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return self._threads.block[one_based - 1]

    @staticmethod
    def _warp(one_based: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return (one_based - 1) >> 5


def _first(race: np.ndarray, lanes: Index, other: npt.NDArray[np.int32]) -> tuple[int, int]:
    at = int(np.flatnonzero(race)[0])
    return int(lanes[at]), int(other[at]) - 1
