"""A driver that does everything at random, with all invariants checked after each event (world.py).

At the end every choice has exactly one end, and whatever was delivered is a prefix of what the request alone yields.
`Driver.event` draws an event from the seed; `Driver.act` does a named one, for tests that choose (and shrink) them.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from protos import front, step
from protos.wire import unpack_int32
from tests.core.sim import SimExecutor, model_card
from tests.core.test_same_tokens import expected_outputs
from tests.core.world import SimWorker, World

EVENTS = {
    "submit": 10, "run": 66, "tick": 6, "credit": 10, "cancel": 3, "stop": 2, "die": 0.6, "join": 2, "seen": 6,
    "loss": 0.6, "drain": 0.2, "corrupt": 0.3, "stale": 1, "resubmit": 1, "restart": 0.2, "ask": 0.5, "burst": 0.5,
}  # fmt: skip


class Driver:
    def __init__(self, seed: int, **config: Any) -> None:
        self.draw = random.Random(seed)
        self.world = World(**config)
        self.models = {"m": model_card("m", "a", "b", 96), "n": model_card("n", "c", "d", 96)}
        self.homes: list[SimExecutor] = []
        for i, model in enumerate("mmn"):
            blocks = self.draw.choice([24, 30, 60])
            limits = step.Limits(blocks, 4, self.draw.choice([2, 5, 12]), self.draw.choice([9, 32]))
            executor = SimExecutor(f"e{i}", i, self.models[model], limits, strict=True)
            self.homes.append(executor)
            self.world.add_executor(executor)
        self.workers = [self.world.add_worker("w0", 100000), self.world.add_worker("w1", 24, auto_credit=False)]
        self.workers[1].allowance = 12
        self.prefixes = [[self.draw.randrange(1, 500) for _ in range(20)] for _ in range(3)]
        self.done: Counter[str] = Counter()  # events by kind
        self.old_results: list[tuple[bytes, step.StepResult]] = []

    def event(self) -> None:
        self.act(self.draw.choices(list(EVENTS), list(EVENTS.values()))[0])

    def act(self, kind: str) -> None:
        self.done[kind] += 1
        getattr(self, kind)()

    def submit(self) -> None:
        draw = self.draw
        prompt = [draw.randrange(1, 500) for _ in range(draw.randrange(1, 20))]
        if draw.random() < 0.5:
            prompt = draw.choice(self.prefixes)[: draw.randrange(1, 21)] + prompt
        more: dict[str, Any] = {}
        if draw.random() < 0.2:
            more["deadline"] = self.world.now + draw.choice([0.02, 0.2, 3.0])
        if draw.random() < 0.3:
            more["stops_on_text"] = True
        if draw.random() < 0.2:
            more["tenant"] = draw.choice("tuv")
        worker = draw.choice(self.workers)
        choices = draw.choice([1, 1, 1, 3])
        worker.submit(
            prompt,
            draw.randrange(1, 48),
            outputs={i: [] for i in range(choices)},
            model=draw.choice("mmn"),
            seed=draw.randrange(100),
            priority=draw.randrange(-3, 4),
            ignore_eos=draw.random() < 0.5,
            **more,
        )

    def burst(self) -> None:
        """Several at once, planned together."""
        self.world.batching = True
        for _ in range(self.draw.randrange(2, 7)):
            self.submit()
        self.world.batching = False
        self.world.settle()

    def run(self) -> None:
        if not self.world.executors:
            return
        session = self.draw.choice(sorted(self.world.executors))
        executor = self.world.executors[session]
        self.world.run(session)
        if self.draw.random() < 0.05 and executor.results:
            self.old_results.append((session, executor.results[-1]))

    def corrupt(self) -> None:
        """An answer that is not what was asked for costs an epoch."""
        session = self.draw.choice(sorted(self.world.executors)) if self.world.executors else b""
        executor = self.world.executors.get(session)
        answer = executor.run() if executor is not None else None
        if executor is None or not isinstance(answer, step.StepResult):
            return
        wrong: list[dict[str, Any]] = [
            {"digest": answer.digest ^ 1}, {"seq": answer.seq + 1}, {"slots": answer.slots + b"\0\0\0\0"},
            {"tokens": answer.tokens + b"\0\0\0\0"},
        ]  # fmt: skip
        if answer.slots:
            high = np.array(unpack_int32(answer.tokens))
            high[-1] = 2**30
            wrong += [{"tokens": answer.tokens[:-4]}, {"tokens": high.tobytes()}]
            wrong += [{"generations": b"\xff\xff" + answer.generations[2:]}]
        changed = msgspec.structs.replace(answer, **self.draw.choice(wrong))
        executor.queue.clear()  # plans of the epoch that ends here
        self.world.from_executor(session, changed)

    def stale(self) -> None:
        """An answer comes a second time, perhaps of an epoch or a session that is long over."""
        if self.old_results:
            session, result = self.old_results.pop(self.draw.randrange(len(self.old_results)))
            executor = self.world.executors.get(session)
            if executor is not None and executor.epoch == result.epoch:
                return  # of the epoch that lives it would cost that: see `corrupt`
            self.world.from_executor(session, result)

    def resubmit(self) -> None:
        """A client comes back with what it has: the same id, a new number. It fences the live request."""
        if not (found := self.some_stream()):
            return
        old = found[0].submits[found[1]]
        outputs = {c.index: list(found[0].outputs[(found[1], c.index)]) for c in old.choices}
        outputs = {i: ids for i, ids in outputs.items() if (found[1], i) not in found[0].ends}
        self.again(self.draw.choice(self.workers), old, outputs)

    def restart(self) -> None:
        """An API worker dies; another takes its name, and the clients come back to it."""
        worker = self.draw.choice(self.workers)
        lost = [worker.submits[number] for number in worker.open]
        outputs = [
            {
                choice.index: list(worker.outputs[(submit.stream, choice.index)])
                for choice in submit.choices
                if (submit.stream, choice.index) not in worker.ends
            }
            for submit in lost
        ]
        self.world.core.on_worker_gone(worker.peer, self.world.now)
        for submit in lost:
            for choice in submit.choices:
                gone = front.Failed(submit.stream, front.UNAVAILABLE, "its API worker died")
                worker.ends.setdefault((submit.stream, choice.index), gone)
        worker.attach()
        for submit, had in zip(lost, outputs, strict=True):
            if self.draw.random() < 0.7:
                self.again(worker, submit, had)

    def again(self, worker: SimWorker, old: front.Submit, outputs: dict[int, list[int]]) -> None:
        worker.submit(
            unpack_int32(old.prompt).tolist(),
            old.max_tokens,
            outputs=outputs,
            model=old.model,
            seed=old.sampling.seed,
            request_id=old.request_id,
            continuation=True,
            arrival=old.arrival,
            priority=old.priority,
            ignore_eos=old.ignore_eos,
            tenant=old.tenant,
            stops_on_text=old.stops_on_text,
        )

    def ask(self) -> None:
        """What operators ask, of any request."""
        found = self.some_stream()
        request = found[0].submits[found[1]].request_id if found else "nobody"
        self.draw.choice(self.workers).send(front.GetStatus(1, request, check_invariants=True))

    def tick(self) -> None:
        self.world.tick(self.draw.choice([0.001, 0.05, 0.4]))

    def credit(self) -> None:
        self.draw.choice(self.workers).give_credit()

    def some_stream(self) -> tuple[SimWorker, int] | None:
        open_streams = [(worker, number) for worker in self.workers for number in worker.open]
        return self.draw.choice(open_streams) if open_streams else None

    def cancel(self) -> None:
        if found := self.some_stream():
            found[0].send(front.Cancel(found[1]))

    def stop(self) -> None:
        if found := self.some_stream():
            worker, number = found
            choice = self.draw.choice(worker.submits[number].choices).index
            count = len(worker.outputs[(number, choice)])
            worker.send(front.Stop(number, choice, self.draw.randrange(1, count + 1) if count else 0))

    def seen(self) -> None:
        worker = self.draw.choice(self.workers)
        rows = [key for key in worker.outputs if key not in worker.ends and worker.submits[key[0]].stops_on_text]
        columns = ([key[0] for key in rows], [key[1] for key in rows], [len(worker.outputs[key]) for key in rows])
        worker.send(front.Seen(*(b"".join(v.to_bytes(4, "little") for v in column) for column in columns)))

    def die(self) -> None:
        if self.world.executors:
            self.world.kill_executor(self.draw.choice(sorted(self.world.executors)))

    def join(self) -> None:
        absent = [executor for executor in self.homes if executor not in self.world.executors.values()]
        if absent:
            executor = self.draw.choice(absent)
            executor.instance += 100
            self.world.add_executor(executor)

    def loss(self) -> None:
        if self.world.executors:
            session = self.draw.choice(sorted(self.world.executors))
            executor = self.world.executors[session]
            assert executor.epoch is not None
            if executor.queue:
                executor.lost = True
                code = self.draw.choice([step.DIGEST_MISMATCH, step.OUT_OF_MEMORY, step.STEP_FAILED])
                self.world.from_executor(session, step.EpochLost(executor.epoch, executor.seq + 1, code, "planned"))

    def drain(self) -> None:
        if len(self.world.executors) > 1:
            self.world.from_executor(self.draw.choice(sorted(self.world.executors)), step.Draining())

    def finish(self) -> None:
        """Everyone comes back, everyone is patient; then all must end."""
        world = self.world
        for session in list(world.executors):
            world.kill_executor(session)
        world.tick(self.draw.choice([3.0, 31.0]))
        for executor in self.homes:
            executor.instance += 100
            world.add_executor(executor)
        for worker in self.workers:
            worker.auto_credit = True
            worker.give_credit()
        for _ in range(5000):
            if not any(worker.open for worker in self.workers):
                break
            self.seen()
            for worker in self.workers:
                worker.give_credit()
            if not world.run_round():
                world.tick(0.3)
        else:
            raise AssertionError(world.stuck())
        world.drain_plans()

    def check(self) -> None:
        for worker in self.workers:
            for (number, choice), outputs in worker.outputs.items():
                expected = expected_outputs(worker.submits[number], choice)
                assert outputs == expected[: len(outputs)], f"{(number, choice)}: other tokens than alone"
                end = worker.ends[(number, choice)]
                if isinstance(end, front.Finished) and end.reason in (front.LENGTH, front.STOP_EOS):
                    assert outputs == expected, f"{(number, choice)}: fewer tokens than alone"


CONFIGS: list[dict[str, Any]] = [
    {},
    {"depth": 1},
    {"depth": 3},
    {"max_prefill_chunk": 3},
    {"prefix_cache": False},
    {"text_run_ahead": 2, "prefix_wait": 0.01},
    {"max_waiting": 6},
    {"kv_overcommit": 1.0},
    {"kv_overcommit": 0.0, "depth": 4},
    {"fair_window": 0.0, "placement_wait": 0.01},
    {"fair_tokens": 16, "ageing": 0.5},
]


def driver_of(seed: int, **more: Any) -> Driver:
    """The driver of one seed: its world and configuration follow from it."""
    return Driver(seed, **more, wait_for_executor=20.0, quarantine=2.0, **CONFIGS[seed % len(CONFIGS)])
