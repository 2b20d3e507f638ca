"""What the core wants sent, in order. The shell takes it; nothing here knows of sockets."""

from __future__ import annotations

from typing import NamedTuple

from protos import front, step

EXECUTOR = "executor"
WORKER = "worker"


class Destination(NamedTuple):
    kind: str  # EXECUTOR or WORKER
    peer: bytes  # session or worker id: the ZeroMQ routing id


Message = step.ToExecutor | front.ToWorker


class Outbox:
    def __init__(self) -> None:
        self._items: list[tuple[Destination, Message]] = []
        self._executors: dict[bytes, Destination] = {}  # peers, as they are addressed
        self._workers: dict[bytes, Destination] = {}
        self._heard: Destination | None = None  # has `last_sent` of this moment already
        self.last_sent: dict[Destination, float] = {}  # peers that are to hear from us; the time they last did
        self._now = 0.0

    def at(self, now: float) -> None:
        if now != self._now:
            self._now = now
            self._heard = None

    def add_peer(self, destination: Destination) -> None:
        self.last_sent[destination] = self._now
        self._known(destination.kind)[destination.peer] = destination

    def drop_peer(self, destination: Destination) -> None:
        self.last_sent.pop(destination, None)
        self._known(destination.kind).pop(destination.peer, None)
        self._heard = None

    def to_executor(self, session: bytes, message: step.ToExecutor) -> None:
        self._put(self._executors.get(session) or Destination(EXECUTOR, session), message)

    def to_worker(self, worker: bytes, message: front.ToWorker) -> None:
        self._put(self._workers.get(worker) or Destination(WORKER, worker), message)

    def take(self) -> list[tuple[Destination, Message]]:
        items, self._items = self._items, []
        return items

    def silent_since(self, before: float) -> list[Destination]:
        """Peers to which nothing was sent after ``before``."""
        return [destination for destination, sent in self.last_sent.items() if sent <= before]

    def _put(self, destination: Destination, message: Message) -> None:
        if destination is not self._heard:
            if destination in self.last_sent:
                self.last_sent[destination] = self._now
            self._heard = destination
        self._items.append((destination, message))

    def _known(self, kind: str) -> dict[bytes, Destination]:
        return self._executors if kind == EXECUTOR else self._workers
