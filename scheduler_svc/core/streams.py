"""The live streams, and the one end of each choice.

Every choice ends through `finish`, every stream that cannot go on through `fail`; both take what it holds away from
it first. `drop` is for streams whose worker is gone, or that another one replaces: nobody is left to tell.
"""

from __future__ import annotations

import heapq
from itertools import count

from protos import front
from scheduler_svc.core.outbox import Outbox
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import Sequence, State, Stream
from scheduler_svc.core.tenants import Tenants


class Streams:
    def __init__(self, outbox: Outbox, residency: Residency, tenants: Tenants) -> None:
        self.by_request: dict[tuple[str, str], Stream] = {}  # all live ones, by (tenant, request id)
        self.finished = 0  # choices
        self.failed = 0  # streams
        self._outbox = outbox
        self._residency = residency
        self._tenants = tenants
        self._deadlines: list[tuple[float, int, Stream]] = []
        self._ties = count()

    def add(self, stream: Stream) -> None:
        self.by_request[stream.name] = stream
        stream.worker.streams[stream.number] = stream
        stream.model.live_streams += 1
        if stream.deadline > 0.0:
            heapq.heappush(self._deadlines, (stream.deadline, next(self._ties), stream))
            if len(self._deadlines) > 2 * len(self.by_request) + 64:  # mostly of streams that ended before
                self._deadlines = [item for item in self._deadlines if item[2].live]
                heapq.heapify(self._deadlines)

    def finish(self, sequence: Sequence, reason: int, outputs: int, stop_token: int = -1) -> None:
        """The end of a choice at ``outputs`` tokens."""
        if sequence.state is State.ENDED:
            raise RuntimeError("a choice cannot end twice")
        self._residency.detach(sequence)
        if 4 * outputs < len(sequence.outputs):
            sequence.cut(outputs)  # those past a stop string: nobody pays for them
        stream = sequence.stream
        self.finished += 1
        cached = max(sequence.cached_tokens, 0)
        message = front.Finished(stream.number, sequence.choice, reason, outputs, cached, stop_token)
        self._outbox.to_worker(stream.worker.peer, message)
        stream.live -= 1
        if stream.live == 0:
            self._remove(stream)

    def fail(self, stream: Stream, code: int, message: str, retry_after: float = 0.0) -> None:
        self.drop(stream)
        self.failed += 1
        self._outbox.to_worker(stream.worker.peer, front.Failed(stream.number, code, message[:4096], retry_after))

    def drop(self, stream: Stream) -> None:
        for sequence in stream.sequences.values():
            if sequence.state is not State.ENDED:
                self._residency.detach(sequence)
        stream.live = 0
        self._remove(stream)

    def expire(self, now: float) -> None:
        """Fail every stream whose deadline passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, stream = heapq.heappop(self._deadlines)
            if stream.live:
                self.fail(stream, front.DEADLINE_EXCEEDED, "the deadline passed")

    def next_deadline(self) -> float | None:
        while self._deadlines and not self._deadlines[0][2].live:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _remove(self, stream: Stream) -> None:
        self._tenants.closed(stream)
        del self.by_request[stream.name]
        del stream.worker.streams[stream.number]
        stream.model.live_streams -= 1
        stream.sequences = {}  # they know their stream: no cycle is left behind (garbage.py)
