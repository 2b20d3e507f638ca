"""Cores that crash in a row, in virtual time: who did it is found, in few crashes, and the others go on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest

from protos import front, step
from protos.wire import unpack_int32
from scheduler_svc.core.crash_ledger import Ledger, LedgerFile
from scheduler_svc.core.trials import AFTER, STABLE, Trials
from tests.core.sim import POISON
from tests.core.world import SimWorker, World

LIMITS = step.Limits(4096, 4, 64, 256)


class Crash(Exception):
    """The core's end."""


class TriedWorld(World):
    """One core's life. A Submit whose prompt begins with POISON ends it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.trials = Trials(self.core, LedgerFile(descriptor), self._answer, self.now)
        handle = self.core.front_desk.handle

        def planted(peer: bytes, message: front.ToCore, now: float) -> None:
            if isinstance(message, front.Submit) and unpack_int32(message.prompt)[0] == POISON:
                raise Crash
            handle(peer, message, now)

        self.core.front_desk.handle = planted  # type: ignore[method-assign]

    def _answer(self, peer: bytes, message: front.Failed) -> None:
        self.workers[peer].on_message(message)

    def from_worker(self, worker: SimWorker, message: front.ToCore) -> None:
        self.trials.on_front(worker.peer, message, self.now)
        self.settle()

    def settle(self) -> None:
        self.trials.turn(self.now)
        super().settle()


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = os.memfd_create("ledger")
    yield number
    os.close(number)


def live(descriptor: int, waiting: dict[str, list[int]], failed: dict[str, front.Failed]) -> None:
    """One core's life, with two API workers that submit all that waits, until each of it ended. Raises Crash."""
    world = TriedWorld(descriptor)
    workers = [world.add_worker("w0"), world.add_worker("w1")]
    world.add_executor(limits=LIMITS)
    numbers: dict[tuple[SimWorker, int], str] = {}
    try:
        for i, (name, prompt) in enumerate(list(waiting.items())):
            worker = workers[i % 2]
            numbers[worker, worker.submit(prompt, 12, request_id=name, continuation=True)] = name
        world.run_all()
    finally:
        for (worker, number), name in numbers.items():
            end = worker.ends.get((number, 0))
            if end is not None:
                waiting.pop(name)
                if isinstance(end, front.Failed):
                    failed[name] = end
    world.tick(STABLE)
    world.settle()


@pytest.mark.parametrize(("mates", "culprits"), [(0, 1), (1, 1), (30, 1), (200, 1), (60, 2)])
def test_the_request_that_crashes_every_core_ends_and_the_others_go_on(
    mates: int, culprits: int, descriptor: int
) -> None:
    waiting = {f"good-{i}": [1 + i, 2, 3] for i in range(mates)}
    bad = {f"bad-{i}": [POISON, i] for i in range(culprits)}
    for i, (name, prompt) in enumerate(bad.items()):  # among the others
        names = list(waiting.items())
        at = (i + 1) * len(names) // 3
        waiting = dict([*names[:at], (name, prompt), *names[at:]])
    failed: dict[str, front.Failed] = {}
    crashes = 0
    while waiting:
        try:
            live(descriptor, waiting, failed)
        except Crash:
            crashes += 1
            assert crashes <= AFTER + 3 * culprits, "one in a group, two alone"
    assert failed.keys() == bad.keys()
    for end in failed.values():
        assert end.code == front.INTERNAL
        assert "alone" in end.message
    assert LedgerFile(descriptor).ledger == Ledger(running=True), "what was long ago is forgiven"


def test_without_crashes_nothing_is_held(descriptor: int) -> None:
    world = TriedWorld(descriptor)
    worker = world.add_worker()
    world.add_executor(limits=LIMITS)
    numbers = [worker.submit([1, i], 4) for i in range(9)]
    assert worker.accepted == set(numbers)
    world.run_all()
    world.trials.stopped()
    assert LedgerFile(descriptor).ledger == Ledger()


def test_groups_are_small_and_cancels_reach_what_is_held(descriptor: int) -> None:
    LedgerFile(descriptor).save()
    file = LedgerFile(descriptor)
    file.ledger.running, file.ledger.crashes = True, AFTER - 1
    file.save()
    world = TriedWorld(descriptor)
    worker = world.add_worker()
    world.batching = True
    numbers = [worker.submit([1, i], 12) for i in range(26)]
    world.add_executor(limits=LIMITS)
    assert len(worker.accepted) <= math.isqrt(26)
    last = numbers[-1]
    assert last not in worker.accepted
    worker.send(front.Cancel(last))
    end = worker.ends[(last, 0)]
    assert isinstance(end, front.Failed)
    assert end.code == front.ABORTED
    world.run_all()
    assert len(worker.accepted) == 25


def test_a_steady_flow_of_requests_is_not_held_for_ever(descriptor: int) -> None:
    """What comes later than the first seconds is let in once all that came in them was tried."""
    file = LedgerFile(descriptor)
    file.ledger.running, file.ledger.crashes = True, AFTER - 1
    file.save()
    world = TriedWorld(descriptor)
    worker = world.add_worker()
    world.add_executor(limits=LIMITS)
    while LedgerFile(descriptor).ledger.crashes:
        assert world.now < 1000.0 + 3 * STABLE
        worker.submit([1, 2], 12)
        world.run_round()
        world.tick(0.03)
    before = len(worker.accepted)
    worker.submit([1, 2], 12)
    assert len(worker.accepted) == before + 1
    world.run_all()


def test_a_ledger_that_was_cut_off_is_an_empty_one(descriptor: int) -> None:
    os.pwrite(descriptor, (99).to_bytes(4, "little") + b"\x85", 0)
    assert LedgerFile(descriptor).ledger == Ledger()
