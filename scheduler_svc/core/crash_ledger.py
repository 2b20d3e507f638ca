"""What one core leaves to the next: how often cores crashed in a row, and which requests were on trial (trials.py).

It lies in a file without a name that the supervisor made and hands to every core it starts (``--ledger-fd``): it
outlives a core that crashes, however it does, and ends with the service.
"""

from __future__ import annotations

import os

import msgspec

_LARGEST = 1024 * 1024  # bytes


class Ledger(msgspec.Struct):
    running: bool = False  # a core runs; still true at the next start: it crashed
    crashes: int = 0  # in a row
    trial: list[bytes] = []  # keys of the requests on trial
    suspects: list[bytes] = []  # those that were on trial, beside others, when a core crashed
    alone: dict[bytes, int] = {}  # crashes at which a request was on trial alone
    condemned: list[bytes] = []


class LedgerFile:
    """``ledger`` is as the former core left it; ``save`` makes it what the next one finds."""

    def __init__(self, descriptor: int) -> None:
        """Raises OSError where the descriptor is none of a file."""
        self._descriptor = descriptor
        data = os.pread(descriptor, _LARGEST, 0)
        size = int.from_bytes(data[:4], "little")
        try:
            self.ledger = msgspec.msgpack.decode(data[4 : 4 + size], type=Ledger) if size else Ledger()
        except msgspec.DecodeError:  # it died while it wrote
            self.ledger = Ledger()

    def save(self) -> None:
        data = msgspec.msgpack.encode(self.ledger)
        os.pwrite(self._descriptor, len(data).to_bytes(4, "little") + data, 0)
