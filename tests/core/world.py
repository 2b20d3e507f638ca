"""A whole service in virtual time: the core, model executors and model API workers, with nothing but queues between.

Every message is encoded and decoded on its way, and `check_all` runs after every event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from protos import front, step
from protos.wire import pack_int32, unpack_int32
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.invariants import check_all, check_progress
from scheduler_svc.core.outbox import EXECUTOR, Destination, Message
from scheduler_svc.core.recording import RecordingCore
from scheduler_svc.prefix_hash import block_hashes
from tests.core.sim import Killed, SimExecutor, model_card

Items = list[tuple[Destination, Message]]

_encode = msgspec.msgpack.Encoder().encode
_to_executor = msgspec.msgpack.Decoder(step.ToExecutor).decode
_from_executor = msgspec.msgpack.Decoder(step.ToCore).decode
_to_worker = msgspec.msgpack.Decoder(front.ToWorker).decode
_from_worker = msgspec.msgpack.Decoder(front.ToCore).decode


class SimWorker:
    """Collects what streams yield, and insists on one end for each choice."""

    def __init__(self, world: World, peer: bytes, window: int, auto_credit: bool) -> None:
        self.world = world
        self.peer = peer
        self.name = peer.decode()
        self.window = window
        self.auto_credit = auto_credit
        self.allowance = 0  # told with every Credit; 0: the window
        self.received = 0
        self.credited = 0
        self.next_stream = 1
        self.submits: dict[int, front.Submit] = {}
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], front.Finished | front.Failed | front.Rejected] = {}
        self.accepted: set[int] = set()
        self.messages: list[front.ToWorker] = []
        self.models: dict[str, front.ModelState] = {}

    def attach(self) -> None:
        self.received = self.credited = 0
        self.send(front.Attach(front.FRONT_VERSION, self.name, 7, self.window))

    def send(self, message: front.ToCore) -> None:
        self.world.from_worker(self, message)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        outputs: dict[int, list[int]] | None = None,
        model: str = "m",
        seed: int = 0,
        request_id: str = "",
        hashes: bool = True,
        sampling: step.SamplingParams | None = None,
        **more: object,
    ) -> int:
        number = self.next_stream
        self.next_stream += 1
        outputs = outputs if outputs is not None else {0: []}
        data = pack_int32(prompt)
        state = self.models.get(model)
        digest = b""
        if hashes and state is not None:
            digest = block_hashes(state.fingerprint, str(more.get("tenant", "")), unpack_int32(data), state.block_size)
        submit = front.Submit(
            stream=number,
            request_id=request_id or f"{self.name}-{number}",
            model=model,
            prompt=data,
            choices=tuple(front.Choice(index, pack_int32(ids)) for index, ids in outputs.items()),
            sampling=sampling or step.SamplingParams(seed=seed),
            max_tokens=max_tokens,
            block_hashes=digest,
            continuation=bool(more.pop("continuation", any(outputs.values()))),
            arrival=more.pop("arrival", self.world.now),  # type: ignore[arg-type]
            **more,  # type: ignore[arg-type]
        )
        self.submits[number] = submit
        for index, ids in outputs.items():
            self.outputs[(number, index)] = list(ids)
        self.send(submit)
        return number

    def on_message(self, message: front.ToWorker) -> None:
        self.messages.append(message)
        match message:
            case front.Tokens():
                self._on_tokens(message)
            case front.Finished():
                key = (message.stream, message.choice)
                self._end(key, message)
                assert message.outputs <= len(self.outputs[key])
                del self.outputs[key][message.outputs :]
            case front.Failed() | front.Rejected():
                if isinstance(message, front.Rejected):
                    assert message.stream not in self.accepted
                for choice in self.submits[message.stream].choices:
                    if isinstance(message, front.Rejected) or (message.stream, choice.index) not in self.ends:
                        self._end((message.stream, choice.index), message)
            case front.Accepted():
                assert message.stream not in self.accepted
                self.accepted.add(message.stream)
            case front.Models():
                self.models = {state.name: state for state in message.models}

    def _end(self, key: tuple[int, int], message: front.Finished | front.Failed | front.Rejected) -> None:
        assert key not in self.ends, f"{key} ended twice: {self.ends[key]}, {message}"
        self.ends[key] = message

    def _on_tokens(self, message: front.Tokens) -> None:
        streams, tokens = unpack_int32(message.streams).tolist(), unpack_int32(message.tokens).tolist()
        choices = list(message.choices) or [0] * len(streams)
        counts = list(message.counts) or [1] * len(streams)
        assert len(streams) == len(choices) == len(counts)
        assert sum(counts) == len(tokens)
        at = 0
        for stream, choice, count in zip(streams, choices, counts, strict=True):
            assert stream in self.accepted
            assert (stream, choice) not in self.ends, f"tokens after the end of {(stream, choice)}"
            self.outputs[(stream, choice)] += tokens[at : at + count]
            at += count
        self.received += len(tokens)
        assert self.received - self.credited <= self.window, "more tokens than the credit allows"

    def give_credit(self) -> None:
        if self.received > self.credited:
            self.credited = self.received
            self.send(front.Credit(self.received, self.allowance))

    @property
    def open(self) -> list[int]:
        """Streams with a choice that has not ended."""
        return [
            number
            for number, submit in self.submits.items()
            if any((number, choice.index) not in self.ends for choice in submit.choices)
        ]


class World:
    def __init__(self, record: Path | None = None, **config: Any) -> None:
        self.now = 1000.0
        settings = CoreConfig(**config)
        self.core = (
            Core(settings, self.now, incarnation=42)
            if record is None
            else RecordingCore(settings, self.now, record, incarnation=42)
        )
        self.executors: dict[bytes, SimExecutor] = {}  # by session; gone ones are taken out
        self.workers: dict[bytes, SimWorker] = {}
        self.tamper: Callable[[Items], Items] = lambda items: items
        self.events = 0
        self.batching = False  # True: worker messages are applied, plans wait for `settle`
        self.sent: dict[bytes, list[Message]] = defaultdict(list)  # to peers that nobody plays
        self._sessions = 0

    # -- peers -------------------------------------------------------------------------------------------------------

    def add_executor(self, executor: SimExecutor | None = None, **fields: object) -> tuple[bytes, SimExecutor]:
        """A session of a new or given executor: says hello."""
        executor = executor or SimExecutor(**fields)  # type: ignore[arg-type]
        self._sessions += 1
        session = f"session-{self._sessions}".encode()
        executor.queue.clear()
        self.executors[session] = executor
        self.from_executor(session, executor.hello())
        return session, executor

    def kill_executor(self, session: bytes) -> SimExecutor:
        executor = self.executors.pop(session)
        executor.queue.clear()
        self.core.on_session_gone(session, self.now)
        self.settle()
        return executor

    def add_worker(self, name: str = "w0", window: int = 65536, auto_credit: bool = True) -> SimWorker:
        worker = SimWorker(self, name.encode(), window, auto_credit)
        self.workers[worker.peer] = worker
        worker.attach()
        return worker

    # -- events ------------------------------------------------------------------------------------------------------

    def from_executor(self, session: bytes, message: step.ToCore) -> None:
        executor = self.executors.get(session)
        if isinstance(message, step.StepResult) and executor is not None and message.epoch == executor.epoch:
            executor.answered = message.seq
        self.core.on_executor(session, _from_executor(_encode(message)), self.now)
        self.settle()

    def from_worker(self, worker: SimWorker, message: front.ToCore) -> None:
        self.core.on_front(worker.peer, _from_worker(_encode(message)), self.now)
        if not self.batching:
            self.settle()

    def tick(self, seconds: float) -> None:
        """Let time pass, in the steps that the core asks for."""
        end = self.now + seconds
        while True:
            deadline = self.core.next_deadline()
            self.now = end if deadline is None else min(end, max(deadline, self.now + 1e-6))
            self.core.on_tick(self.now)
            self.settle()
            if self.now >= end:
                return

    def run(self, session: bytes) -> bool:
        """One plan of one executor, if it has any."""
        executor = self.executors[session]
        self.now += 0.001
        try:
            answer = executor.run()
        except Killed:
            self.kill_executor(session)
            return True
        if answer is None:
            return False
        self.from_executor(session, answer)
        return True

    def run_round(self) -> bool:
        """One plan of each executor. Returns whether any had one."""
        return sum(self.run(session) for session in list(self.executors) if session in self.executors) > 0

    def settle(self) -> None:
        """Plans made, messages carried, invariants checked."""
        self.events += 1
        self.core.advance(self.now)
        while (items := self.core.take_outbox()) or self.core.has_more_to_plan:
            for destination, message in self.tamper(items):
                self._deliver(destination, message)
            self.core.advance(self.now)
        problems = check_all(self.core) + check_progress(self.core)
        assert not problems, problems

    def _deliver(self, destination: Destination, message: Message) -> None:
        data = _encode(message)
        if destination.kind == EXECUTOR:
            executor = self.executors.get(destination.peer)
            if executor is None:
                self.sent[destination.peer].append(message)
                return
            for answer in executor.receive(_to_executor(data)):
                self.core.on_executor(destination.peer, _from_executor(_encode(answer)), self.now)
        else:
            worker = self.workers.get(destination.peer)
            if worker is None:
                self.sent[destination.peer].append(message)
                return
            worker.on_message(_to_worker(data))
            if worker.auto_credit and worker.received > worker.credited:
                worker.credited = worker.received
                self.core.on_front(worker.peer, front.Credit(worker.received), self.now)

    # -- whole runs --------------------------------------------------------------------------------------------------

    def run_all(self, most: int = 20000) -> None:
        """Until every stream has ended; fails when nothing moves any more."""
        for _ in range(most):
            if not any(worker.open for worker in self.workers.values()):
                break
            if not self.run_round():
                before = self.core.committer.tokens, len(self.core.streams.by_request)
                self.tick(1.1)
                idle = not any(executor.queue for executor in self.executors.values())
                after = self.core.committer.tokens, len(self.core.streams.by_request)
                assert not idle or before != after, self.stuck()
        else:
            raise AssertionError(self.stuck())
        self.drain_plans()

    def drain_plans(self) -> None:
        """Answer what is still unanswered; then nothing may be held."""
        while self.run_round():
            pass
        for executor in self.core.fleet.sessions.values():
            assert executor.table.used == executor.pool.owned == len(executor.inflight) == 0

    def stuck(self) -> str:
        waits = [s.waits_for for entry in self.core.fleet.models.values() for s in entry.queue]
        running = [s.stream.request_id for e in self.core.fleet.sessions.values() for s in e.residents()]
        return f"nothing moves: waiting {waits}, running {running}"


def simple_world(executors: int = 1, limits: step.Limits | None = None, **config: Any) -> tuple[World, SimWorker]:
    """A world of some executors of one model, and one worker with plenty of credit."""
    world = World(**config)
    for i in range(executors):
        executor = SimExecutor(f"e{i}", i + 1, model_card())
        if limits is not None:
            executor.limits = limits
        world.add_executor(executor)
    return world, world.add_worker()
