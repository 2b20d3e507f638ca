"""The file of a record: what a core was told and said, with its times (recording.py writes it, replay.py runs it).

It is a sequence of entries, each a 4-byte little-endian length and a MessagePack value: a `Header`, then `Entry`
values in the order in which they happened. Calls into the core are told apart by ``kind``; each `take_outbox` that had
something to send is an OUT entry with the number of messages, followed by that many messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.tenant_limits import LimitsFile

FORMAT = 1
_LARGEST = 256 * 1024 * 1024  # bytes of an entry

# Kinds of entries: what the core was told ...
FROM_WORKER = "w"
FROM_EXECUTOR = "e"
SESSION_GONE = "s"
WORKER_GONE = "g"
DISCONNECT = "d"
MALFORMED = "m"
STALL = "l"
LIMITS = "n"
TICK = "t"
ADVANCE = "a"
# ... and what it said.
OUT = "o"
TO_WORKER = "W"
TO_EXECUTOR = "E"


class Header(msgspec.Struct, frozen=True):
    format: int
    config: CoreConfig
    limits: LimitsFile
    started: float
    incarnation: int


class Entry(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    now: float
    peer: bytes = b""
    data: bytes = b""


class RecordError(ValueError):
    """The file is no record, or ends in the middle of an entry."""


def read(path: Path) -> tuple[Header, Iterator[Entry]]:
    """The header, and the entries as they are read. Raises RecordError or OSError; an entry that was cut short at the
    end of the file (the core died while it wrote) ends the record."""
    file = path.open("rb")
    data = _next(file)
    try:
        header = msgspec.msgpack.decode(data or b"", type=Header)
    except msgspec.DecodeError as error:
        file.close()
        raise RecordError(f"{path}: not a record of a core: {error}") from error
    if header.format != FORMAT:
        file.close()
        raise RecordError(f"{path}: a record of format {header.format}, this is {FORMAT}")
    return header, _entries(path, file)


def _entries(path: Path, file: BinaryIO) -> Iterator[Entry]:
    decode = msgspec.msgpack.Decoder(Entry).decode
    with file:
        while (data := _next(file)) is not None:
            try:
                yield decode(data)
            except msgspec.DecodeError as error:
                raise RecordError(f"{path}: a damaged entry: {error}") from error


def _next(file: BinaryIO) -> bytes | None:
    prefix = file.read(4)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 4 or length > _LARGEST:
        return None
    data = file.read(length)
    return data if len(data) == length else None
