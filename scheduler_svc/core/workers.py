"""The API workers: who is attached, and how many tokens each may still be sent.

Credit is cumulative on both sides, so a lost or repeated Credit does no harm: ``outstanding = sent - credited``, and
rows are planned only while ``outstanding + unanswered rows < window`` (planner.py). Choices that have had their first
token stand still earlier, at the worker's ``allowance``: a worker that falls behind still gets its new streams' first
tokens, and has little queued before them.
"""

from __future__ import annotations

from protos import front
from scheduler_svc.core.outbox import WORKER, Destination, Outbox
from scheduler_svc.core.sequence import Stream
from scheduler_svc.core.unanswered import Unanswered

_PATIENCE = 1.0  # seconds


class WorkerState:
    def __init__(self, peer: bytes, attach: front.Attach, index: int) -> None:
        self.peer = peer
        self.name = attach.worker
        self.incarnation = attach.incarnation
        self.window = attach.window
        self.allowance = attach.window
        self.heard_of = 0.0  # when its last credit came
        self.index = index  # into the slot tables' `worker` column
        self.sent = 0  # tokens, since Attach
        self.credited = 0
        self.streams: dict[int, Stream] = {}

    def credit(self, message: front.Credit, now: float) -> None:
        self.heard_of = now
        self.credited = max(self.credited, min(message.tokens, self.sent))
        if message.allowance:
            self.allowance = min(message.allowance, self.window)

    @property
    def room(self) -> int:
        """Tokens that may be sent now."""
        return self.allowance - (self.sent - self.credited)

    @property
    def room_for_first(self) -> int:
        """First tokens that may be sent now."""
        return self.window - (self.sent - self.credited)


class Workers:
    def __init__(self, outbox: Outbox, max_workers: int, unanswered: Unanswered | None = None) -> None:
        self.by_peer: dict[bytes, WorkerState] = {}
        self.by_index: list[WorkerState | None] = []
        self.unanswered = unanswered or Unanswered()
        self._outbox = outbox
        self._max_workers = max_workers

    def find(self, name: str) -> WorkerState | None:
        return next((worker for worker in self.by_peer.values() if worker.name == name), None)

    @property
    def full(self) -> bool:
        return len(self.by_peer) >= self._max_workers

    def stands_still(self, index: int, now: float) -> bool:
        """It gave no credit for a while."""
        worker = self.by_index[index]
        return worker is None or now - worker.heard_of > _PATIENCE

    def add(self, peer: bytes, attach: front.Attach) -> WorkerState:
        if None in self.by_index:
            index = self.by_index.index(None)
        else:
            index = len(self.by_index)
            self.by_index.append(None)
        worker = WorkerState(peer, attach, index)
        self.by_index[index] = worker
        self.by_peer[peer] = worker
        self._outbox.add_peer(Destination(WORKER, peer))
        return worker

    def remove(self, worker: WorkerState) -> None:
        """Forget a worker; its streams were dropped before."""
        assert not worker.streams
        del self.by_peer[worker.peer]
        self.by_index[worker.index] = None
        self._outbox.drop_peer(Destination(WORKER, worker.peer))
