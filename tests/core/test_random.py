"""A seeded driver that does everything at random, thousands of events, with all invariants checked after each.

At the end every choice has exactly one end, and whatever was delivered is a prefix of what the request alone yields.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from protos import front, step
from tests.core.sim import SimExecutor, model_card
from tests.core.test_same_tokens import expected_outputs
from tests.core.world import SimWorker, World

EVENTS = 700


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
        self.prefixes = [[self.draw.randrange(1, 500) for _ in range(20)] for _ in range(3)]
        self.cancelled: set[tuple[bytes, int]] = set()

    def event(self) -> None:
        kind = self.draw.choices(
            ["submit", "run", "tick", "credit", "cancel", "stop", "die", "join", "seen", "loss", "drain"],
            [14, 60, 6, 10, 3, 2, 0.6, 2, 6, 0.6, 0.2],
        )[0]
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
            more["tenant"] = "t"
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

    def run(self) -> None:
        if self.world.executors:
            self.world.run(self.draw.choice(sorted(self.world.executors)))

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
            count = len(worker.outputs[(number, 0)])
            worker.send(front.Stop(number, 0, self.draw.randrange(1, count + 1) if count else 0))

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
                assert outputs == expected[: len(outputs)]
                end = worker.ends[(number, choice)]
                if isinstance(end, front.Finished) and end.reason in (front.LENGTH, front.STOP_EOS):
                    assert outputs == expected


CONFIGS: list[dict[str, Any]] = [
    {},
    {"depth": 1},
    {"depth": 3},
    {"max_prefill_chunk": 3},
    {"prefix_cache": False},
    {"text_run_ahead": 2, "prefix_wait": 0.01},
    {"max_waiting": 6},
]


@pytest.mark.parametrize("seed", range(14))
def test_anything_in_any_order(seed: int) -> None:
    driver = Driver(seed, wait_for_executor=20.0, quarantine=2.0, **CONFIGS[seed % len(CONFIGS)])
    for _ in range(EVENTS):
        driver.event()
    driver.finish()
    driver.check()
