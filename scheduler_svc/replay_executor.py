"""Play the core of a record to an executor: the same plans in the same order, and are its tokens the same?

Plans carry their epochs and digests, so the executor checks its mirror as it did then. Answers are awaited in order;
no more plans are unanswered than the recorded core let be.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

import msgspec
import zmq

from protos import step
from protos.wire import Epoch, unpack_int32
from scheduler_svc.core import record_file
from scheduler_svc.core.record_file import Entry

_to_core = msgspec.msgpack.Decoder(step.ToCore).decode
_to_executor = msgspec.msgpack.Decoder(step.ToExecutor).decode
_encode = msgspec.msgpack.Encoder().encode

Key = tuple[Epoch, int]  # (epoch, seq) of a plan


class Recorded:
    """One recorded session: its hello, what it was sent that matters, and what it answered."""

    def __init__(self) -> None:
        self.hello: step.Hello | None = None
        self.sent: list[step.Welcome | step.StepPlan] = []
        self.results: dict[Key, step.StepResult] = {}
        self.plans = 0


def sessions_of(entries: Iterable[Entry]) -> dict[str, Recorded]:
    """By session, in hex."""
    found: dict[str, Recorded] = defaultdict(Recorded)
    for entry in entries:
        session = entry.peer.hex()
        if entry.kind == record_file.FROM_EXECUTOR:
            answer = _to_core(entry.data)
            if isinstance(answer, step.Hello):
                found[session].hello = answer
            elif isinstance(answer, step.StepResult):
                found[session].results.setdefault((answer.epoch, answer.seq), answer)
        elif entry.kind == record_file.TO_EXECUTOR:
            message = _to_executor(entry.data)
            if isinstance(message, step.Welcome | step.StepPlan):
                found[session].sent.append(message)
                found[session].plans += isinstance(message, step.StepPlan)
    return dict(found)


def rerun(entries: Iterable[Entry], listen: str, session: str, wait: float) -> int:
    """Returns the exit status: 0 the same tokens, 1 others, 2 nothing to play or nobody to play with."""
    found = sessions_of(entries)
    chosen = found.get(session) if session else max(found.values(), key=lambda one: one.plans, default=None)
    if chosen is None or chosen.hello is None or not chosen.plans:
        print(f"replay: no session to run again; on record: {', '.join(found) or 'none'}")
        return 2
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 1000)
    try:
        router.bind(listen)
        where = router.getsockopt_string(zmq.LAST_ENDPOINT)
        print(f"waiting at {where} for an executor of {chosen.hello.model.name!r}", flush=True)
        return Player(router, chosen, wait).run()
    except TimeoutError as error:
        print(f"replay: {error}")
        return 2
    finally:
        router.close()
        context.term()


class Player:
    def __init__(self, router: zmq.Socket[bytes], recorded: Recorded, wait: float) -> None:
        self._router = router
        self._recorded = recorded
        self._wait = wait
        self._unanswered: deque[Key] = deque()
        self.counts: Counter[str] = Counter()
        self.first = ""  # difference

    def run(self) -> int:
        assert self._recorded.hello is not None
        peer, hello = self._hello()
        recorded = self._recorded.hello
        if hello.model.fingerprint != recorded.model.fingerprint or hello.limits != recorded.limits:
            self._send(peer, step.Refused("the record is of other weights or other limits", 60.0))
            print(f"replay: recorded {recorded.model.fingerprint[:12]} {recorded.limits}")
            print(f"        came     {hello.model.fingerprint[:12]} {hello.limits}")
            return 2
        if hello.model.numerics != recorded.model.numerics:
            print("other numerics than on record: near-ties may break differently")
        depth = 1
        for message in self._recorded.sent:
            if isinstance(message, step.Welcome):
                depth = message.depth
                while self._unanswered:
                    self._answer(peer)
            else:
                if (message.epoch, message.seq) not in self._recorded.results:
                    continue  # it was lost, or its session ended: nothing to compare with
                while len(self._unanswered) >= depth:
                    self._answer(peer)
                self._unanswered.append((message.epoch, message.seq))
            self._send(peer, message)
        while self._unanswered:
            self._answer(peer)
        self._send(peer, step.Drain())
        counts = self.counts
        print(f"{counts['plans']} plans, {counts['tokens']} tokens, {counts['other']} of them others than on record")
        if self.first:
            print(self.first)
        return 1 if self.first else 0

    def _answer(self, peer: bytes) -> None:
        key = self._unanswered.popleft()
        result = self._receive(peer)
        while not isinstance(result, step.StepResult | step.EpochLost):
            result = self._receive(peer)
        expected = self._recorded.results[key]
        self.counts["plans"] += 1
        if isinstance(result, step.EpochLost) or (result.epoch, result.seq) != key:
            raise TimeoutError(f"plan {key[1]} was answered by {str(result)[:300]}")
        old, new = unpack_int32(expected.tokens), unpack_int32(result.tokens)
        self.counts["tokens"] += len(old)
        same_rows = (result.slots, result.generations) == (expected.slots, expected.generations)
        other = int((old != new).sum()) if same_rows and len(old) == len(new) else max(len(old), len(new), 1)
        self.counts["other"] += other
        if other and not self.first:
            self.first = f"first at plan {key[1]}: {old.tolist()[:16]} on record, {new.tolist()[:16]} now"

    def _hello(self) -> tuple[bytes, step.Hello]:
        while True:
            peer, message = self._next()
            if isinstance(message, step.Hello):
                return peer, message

    def _receive(self, peer: bytes) -> step.ToCore:
        while True:
            sender, message = self._next()
            if sender == peer:
                return message

    def _next(self) -> tuple[bytes, step.ToCore]:
        if not self._router.poll(int(1000 * self._wait)):
            raise TimeoutError(f"nothing came from an executor for {self._wait:g} s")
        peer, data = self._router.recv_multipart()
        message: step.ToCore = _to_core(data)
        return peer, message

    def _send(self, peer: bytes, message: step.ToExecutor) -> None:
        self._router.send_multipart((peer, _encode(message)))
