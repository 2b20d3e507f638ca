"""The scheduler core between model peers, on the clock only while it is the core's turn.

`CoreRig` stands where loop.py stands: frames are decoded, applied, planned and encoded exactly as there, but the
sockets are queues, so what is timed is the core and nothing else. The executor answers from the plans alone (numpy, no
model), the API worker reads what it gets and grants credit; neither is on the clock.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import msgspec
import numpy as np

from protos import front, step
from protos.wire import LE_INT32, pack_int32, unpack_int32
from scheduler_svc.core import garbage
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.outbox import EXECUTOR
from scheduler_svc.prefix_hash import block_hashes

BLOCK, VOCAB, EOS = 16, 49000, 2
WORKER, SESSION = b"worker", b"executor"
FINGERPRINT = "f" * 64


@dataclass
class TurnCost:
    """One turn of the core: events applied, plans made, everything encoded."""

    cpu: float = 0.0  # seconds of processor time
    wall: float = 0.0
    result_bytes: int = 0
    plan_bytes: int = 0
    token_bytes: int = 0
    decode_rows: int = 0  # of the plan


class ModelExecutor:
    """Answers plans as an executor would, from the plan alone: random tokens, never EOS."""

    def __init__(self, max_slots: int, num_blocks: int, context: int, budget: int) -> None:
        card = step.ModelCard("m", "bench", FINGERPRINT, "a" * 64, VOCAB, context, (EOS,), ())
        self.hello = step.Hello((1,), "bench", 1, card, step.Limits(num_blocks, BLOCK, max_slots, budget))
        self.plans: deque[step.StepPlan] = deque()
        self.generations = np.zeros(max_slots, dtype="<u2")
        self.left: dict[int, int] = {}  # slot -> known tokens not run yet, while it prefills
        self.random = np.random.default_rng(0)

    def answer(self) -> step.StepResult:
        plan = self.plans.popleft()
        for admission in plan.admitted:
            self.generations[admission.slot] = admission.generation & 0xFFFF
            known = (len(admission.prompt) + len(admission.outputs)) // 4
            self.left[admission.slot] = known - admission.computed
        slots = unpack_int32(plan.decode)
        sampled = []
        for slot, count in unpack_int32(plan.prefill).reshape(-1, 2).tolist():
            self.left[slot] -= count
            if self.left[slot] == 0:
                sampled.append(slot)
        if sampled:
            slots = np.concatenate([slots, np.array(sampled, dtype=LE_INT32)])
        return step.StepResult(
            plan.epoch,
            plan.seq,
            plan.digest,
            slots=slots.tobytes(),
            generations=self.generations[slots].tobytes(),
            tokens=self.random.integers(3, VOCAB, len(slots), dtype=LE_INT32).tobytes(),
            round_us=5000,
        )


@dataclass
class ModelWorker:
    """Counts tokens and grants credit for them as an API worker does."""

    window: int = 65536
    received: int = 0
    credited: int = 0
    finished: int = 0
    failures: list[str] = field(default_factory=list)

    def take(self, message: front.ToWorker) -> front.ToCore | None:
        if isinstance(message, front.Tokens):
            self.received += len(message.tokens) // 4
            if self.received - self.credited >= self.window // 8:
                self.credited = self.received
                return front.Credit(self.received)
        elif isinstance(message, front.Finished):
            self.finished += 1
        elif isinstance(message, front.Failed | front.Rejected):
            self.failures.append(message.message)
        return None


class CoreRig:
    def __init__(self, max_slots: int, num_blocks: int, context: int, budget: int, **config: object) -> None:
        self.now = 1000.0
        self.core = Core(CoreConfig(**config), self.now, incarnation=1)  # type: ignore[arg-type]
        self.executor = ModelExecutor(max_slots, num_blocks, context, budget)
        self.worker = ModelWorker()
        self.streams = 0
        self.waiting: list[bytes] = []  # frames of the worker for the next turn
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_step = msgspec.msgpack.Decoder(step.ToCore).decode
        self._decode_front = msgspec.msgpack.Decoder(front.ToCore).decode
        self._to_executor = msgspec.msgpack.Decoder(step.ToExecutor).decode
        self._to_worker = msgspec.msgpack.Decoder(front.ToWorker).decode
        self._random = np.random.default_rng(1)
        self.core.on_front(WORKER, front.Attach(front.FRONT_VERSION, "w", 1, self.worker.window), self.now)
        self.core.on_executor(SESSION, self.executor.hello, self.now)
        self.turn()
        garbage.take_over()

    def prompt(self, tokens: int) -> bytes:
        return pack_int32(self._random.integers(3, VOCAB, tokens))

    def submit(self, prompt: bytes, outputs: int) -> None:
        """One request more in the next turn."""
        self.streams += 1
        message = front.Submit(
            stream=self.streams, request_id=f"r{self.streams}", model="m", prompt=prompt,
            choices=(front.Choice(0),), sampling=step.SamplingParams(temperature=0.0), max_tokens=outputs,
            ignore_eos=True, arrival=self.now, block_hashes=block_hashes(FINGERPRINT, "", unpack_int32(prompt), BLOCK),
        )  # fmt: skip
        self.waiting.append(self._encode(message))

    def cancel(self, stream: int) -> None:
        self.waiting.append(self._encode(front.Cancel(stream)))

    def turn(self, around: AbstractContextManager[object] | None = None) -> TurnCost:
        """The oldest plan's result and the worker's frames come in; the core has its turn; what it says is read.
        ``around``: entered for the core's part."""
        self.now += 0.005
        result = self._encode(self.executor.answer()) if self.executor.plans else None
        frames, self.waiting = self.waiting, []
        core, now, encode = self.core, self.now, self._encode
        sent: list[tuple[str, bytes]] = []

        with around or nullcontext():
            wall, cpu = time.perf_counter(), time.thread_time()
            if result is not None:
                core.on_executor(SESSION, self._decode_step(result), now)
            for frame in frames:
                core.on_front(WORKER, self._decode_front(frame), now)
            deadline = core.next_deadline()
            if deadline is not None and deadline <= now:
                core.on_tick(now)
            core.advance(now)
            for destination, message in core.take_outbox():
                sent.append((destination.kind, encode(message)))
            garbage.collect_if_worth(quiet=False)
            cost = TurnCost(time.thread_time() - cpu, time.perf_counter() - wall)

        cost.result_bytes = len(result) if result is not None else 0
        for kind, frame in sent:
            self._read(kind, frame, cost)
        return cost

    def _read(self, kind: str, frame: bytes, cost: TurnCost) -> None:
        if kind == EXECUTOR:
            message = self._to_executor(frame)
            if isinstance(message, step.StepPlan):
                self.executor.plans.append(message)
                cost.plan_bytes += len(frame)
                cost.decode_rows += len(message.decode) // 4
            elif isinstance(message, step.Refused | step.Rehello):
                raise RuntimeError(f"the core refused the executor: {message}")
            return
        answer = self.worker.take(self._to_worker(frame))
        if self.worker.failures:
            raise RuntimeError(f"the core failed a request: {self.worker.failures}")
        if answer is not None:
            self.waiting.append(self._encode(answer))
        cost.token_bytes += len(frame)

    def settle(self) -> None:
        """Turns until no prompt is left to run and nothing waits."""
        executor = next(iter(self.core.fleet.sessions.values()))
        while self.waiting or executor.prefilling or len(executor.model.queue):
            self.turn()
