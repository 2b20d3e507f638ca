"""A record of everything that a core was told and said, with its times: enough to run it again, bit for bit.

The file is a sequence of entries, each a 4-byte little-endian length and a MessagePack value: a `Header`, then
`Entry` values in the order in which they happened. Calls into the core are told apart by ``kind``; each `take_outbox`
that had something to send is an OUT entry with the number of messages, followed by that many messages.

It holds prompts and outputs, so it is readable by its owner only. A file that is there already is kept: a core that
was started again goes on in FILE.1, FILE.2, ...
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from protos import front, step
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.outbox import EXECUTOR, Destination, Message
from scheduler_svc.core.tenants import NO_LIMITS, LimitsFile

log = logging.getLogger(__name__)

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


class RecordingCore(Core):
    """A core that writes down every call before it acts on it, and every message that it sends."""

    def __init__(
        self,
        config: CoreConfig,
        now: float,
        path: Path,
        incarnation: int | None = None,
        limits: LimitsFile = NO_LIMITS,
    ) -> None:
        super().__init__(config, now, incarnation, limits)
        self._file: BinaryIO | None = _create(path)
        self._encode = msgspec.msgpack.Encoder().encode
        self._write(Header(FORMAT, config, limits, now, self.incarnation))

    def on_front(self, worker_id: bytes, message: front.ToCore, now: float) -> None:
        self._note(FROM_WORKER, now, worker_id, self._encode(message))
        super().on_front(worker_id, message, now)

    def on_executor(self, session: bytes, message: step.ToCore, now: float) -> None:
        self._note(FROM_EXECUTOR, now, session, self._encode(message))
        super().on_executor(session, message, now)

    def on_session_gone(self, session: bytes, now: float) -> None:
        self._note(SESSION_GONE, now, session)
        super().on_session_gone(session, now)

    def on_worker_gone(self, worker_id: bytes, now: float) -> None:
        self._note(WORKER_GONE, now, worker_id)
        super().on_worker_gone(worker_id, now)

    def on_disconnect(self, kind: str, now: float) -> None:
        self._note(DISCONNECT, now, kind.encode())
        super().on_disconnect(kind, now)

    def on_stall(self, now: float) -> None:
        self._note(STALL, now)
        super().on_stall(now)

    def on_malformed(self) -> None:
        self._note(MALFORMED, 0.0)
        super().on_malformed()

    def on_limits(self, limits: LimitsFile) -> None:
        self._note(LIMITS, 0.0, b"", self._encode(limits))
        super().on_limits(limits)

    def on_tick(self, now: float) -> None:
        self._note(TICK, now)
        super().on_tick(now)

    def advance(self, now: float) -> None:
        self._note(ADVANCE, now)
        super().advance(now)

    def take_outbox(self) -> list[tuple[Destination, Message]]:
        items = super().take_outbox()
        if items:
            self._note(OUT, 0.0, str(len(items)).encode())
            for destination, message in items:
                kind = TO_EXECUTOR if destination.kind == EXECUTOR else TO_WORKER
                self._note(kind, 0.0, destination.peer, self._encode(message))
        if self._file is not None:
            try:
                self._file.flush()  # what was sent is on record even if this process dies
            except OSError as error:
                self._give_up(error)
        return items

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _note(self, kind: str, now: float, peer: bytes = b"", data: bytes = b"") -> None:
        self._write(Entry(kind, now, peer, data))

    def _write(self, value: Header | Entry) -> None:
        if self._file is None:
            return
        data = self._encode(value)
        try:
            self._file.write(len(data).to_bytes(4, "little") + data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """The disk is full, say. No stream is lost for the sake of a record: it ends here."""
        log.error("the record ends here", extra={"reason": str(error)})
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what was buffered goes nowhere either
                file.close()


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


def _create(path: Path) -> BinaryIO:
    for number in range(10_000):
        name = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        return os.fdopen(descriptor, "wb", buffering=1 << 20)
    raise OSError(f"{path}: ten thousand records are there already")
