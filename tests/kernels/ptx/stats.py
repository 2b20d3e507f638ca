"""What a kernel asked of memory, by instruction: requests, bytes, 32-byte sectors and shared-memory wavefronts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

SECTOR = 32  # bytes
BANKS = 32  # of four bytes


@dataclass(slots=True)
class Access:
    """One memory instruction over the whole launch. ``transfers`` are sectors (global) or wavefronts (shared);
    ``ideal`` is the fewest that could carry these bytes."""

    where: str
    space: str  # "global" or "shared"
    kind: str  # "load", "store" or "atomic"
    requests: int = 0  # by warps
    bytes: int = 0
    transfers: int = 0
    ideal: int = 0

    @property
    def factor(self) -> float:
        return self.transfers / max(self.ideal, 1)


class Stats:
    def __init__(self) -> None:
        self.accesses: dict[tuple[str, str, str], Access] = {}
        self.loaded: dict[int, int] = {}  # parameter index -> bytes loaded through it

    def matching(self, text: str, space: str) -> list[Access]:
        """Those in ``space`` whose instruction has ``text`` in it: at least one, else KeyError."""
        found = [access for access in self.accesses.values() if text in access.where and access.space == space]
        if not found:
            raise KeyError(f"no access to {space} memory by {text!r}")
        return found

    def count(self, where: str, space: str, kind: str, addresses: Int64, lanes: Int64, width: int) -> None:
        """``addresses`` [n] of ``width`` bytes each, by ``lanes`` [n], in one instruction."""
        if not len(lanes):
            return
        access = self.accesses.setdefault((where, space, kind), Access(where, space, kind))
        warps = lanes >> 5
        access.requests += len(np.unique(warps))
        access.bytes += len(lanes) * width
        if space == "global":
            sectors = np.unique(warps * (1 << 40) + addresses // SECTOR)
            access.transfers += len(sectors)
            access.ideal += int(np.ceil(np.bincount(warps) * width / SECTOR).sum())
        else:
            transfers, ideal = _wavefronts(addresses, lanes, width)
            access.transfers += transfers
            access.ideal += ideal


def _wavefronts(addresses: Int64, lanes: Int64, width: int) -> tuple[int, int]:
    """A warp's request goes in phases of 128 bytes: 32 lanes of four bytes, 16 of eight, 8 of sixteen. A phase takes
    as many wavefronts as different words of one bank it wants."""
    words = max(width // 4, 1)
    per_phase = BANKS // words
    phase = (lanes >> 5) * words + (lanes & 31) // per_phase
    word = (addresses[:, None] >> 2) + np.arange(words)
    unique = np.unique(np.stack([np.repeat(phase, words), word.ravel()], axis=1), axis=0)
    pairs, counts = np.unique(unique[:, 0] * BANKS + unique[:, 1] % BANKS, return_counts=True)
    worst: dict[int, int] = {}
    for key, count in zip((pairs // BANKS).tolist(), counts.tolist(), strict=True):
        worst[key] = max(worst.get(key, 0), count)
    return sum(worst.values()), len(worst)
