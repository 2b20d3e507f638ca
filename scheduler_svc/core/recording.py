"""A core that keeps a record of everything that it was told and said: enough to run it again, bit for bit.

The file (record_file.py) holds prompts and outputs, so it is readable by its owner only. A file that is there already
is kept: a core that was started again goes on in FILE.1, FILE.2, ...
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from protos import front, step
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.outbox import EXECUTOR, Destination, Message
from scheduler_svc.core.record_file import (
    ADVANCE,
    DISCONNECT,
    FORMAT,
    FROM_EXECUTOR,
    FROM_WORKER,
    LIMITS,
    MALFORMED,
    OUT,
    SESSION_GONE,
    STALL,
    TICK,
    TO_EXECUTOR,
    TO_WORKER,
    WORKER_GONE,
    Entry,
    Header,
)  # fmt: skip
from scheduler_svc.core.tenant_limits import NO_LIMITS, LimitsFile

log = logging.getLogger(__name__)


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


def _create(path: Path) -> BinaryIO:
    for number in range(10_000):
        name = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        return os.fdopen(descriptor, "wb", buffering=1 << 20)
    raise OSError(f"{path}: ten thousand records are there already")
