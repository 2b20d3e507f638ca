"""What goes wrong between core and executors costs an epoch or a session, never a token."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from protos import front, step
from scheduler_svc.core.fault_injection import FaultInjector
from tests.core.sim import POISON, SimExecutor, model_card
from tests.core.test_same_tokens import SMALL, assert_reference, requests, submit_all
from tests.core.world import SimWorker, World, simple_world


def start(count: int = 12, **config: Any) -> tuple[World, SimWorker, bytes, SimExecutor]:
    """A world with requests on their way and one executor that answers instead of failing the test."""
    world = World(**config)
    session, executor = world.add_executor(limits=SMALL, strict=False)
    worker = world.add_worker()
    submit_all(world, worker, requests(count))
    return world, worker, session, executor


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("kind", ["lose", "repeat", "reorder", "alter"])
@pytest.mark.parametrize("at", [1, 2, 9, 30])
def test_a_plan_that_goes_wrong_costs_one_epoch_and_no_token(kind: str, at: int, depth: int) -> None:
    world = World(depth=depth)
    injector = FaultInjector(f"{kind}@{at}")
    world.tamper = injector.apply
    world.add_executor(limits=SMALL, strict=False)
    worker = world.add_worker()
    submit_all(world, worker, requests(12))
    world.run_all()
    assert_reference(worker)
    assert world.core.counters["epochs_lost"] == 1


def test_an_injection_that_is_no_spec_is_refused() -> None:
    for spec in ("lose", "lose@x", "melt@3"):
        with pytest.raises(ValueError, match="inject"):
            FaultInjector(spec)


@pytest.mark.parametrize("after", [0, 1, 5, 17, 40])
def test_an_executor_dies_and_comes_back(after: int) -> None:
    world, worker, session, executor = start()
    for _ in range(after):
        world.run(session)
    world.kill_executor(session)
    assert worker.open
    world.tick(3.0)
    executor.instance += 1
    world.add_executor(executor)
    world.run_all()
    assert_reference(worker)


def test_the_sequences_of_a_dead_executor_continue_on_another() -> None:
    world, worker, session, _ = start()
    for _ in range(10):
        world.run(session)
    world.add_executor(name="e1", instance=9, limits=SMALL)
    world.kill_executor(session)
    world.run_all()
    assert_reference(worker)


def test_other_numerics_do_not_continue_what_has_outputs() -> None:
    world, worker = simple_world()
    number = worker.submit([1, 2, 3], 30, ignore_eos=True)
    (session,) = world.executors
    for _ in range(4):
        world.run(session)
    world.kill_executor(session)
    other, _ = world.add_executor(name="e9", instance=9, card=model_card(numerics="c"))
    assert not world.run(other)
    world.tick(31.0)
    end = worker.ends[(number, 0)]
    assert isinstance(end, front.Failed)
    assert end.code == front.UNAVAILABLE


ANSWERS = {
    "digest": lambda r: msgspec.structs.replace(r, digest=r.digest ^ 1),
    "seq": lambda r: msgspec.structs.replace(r, seq=r.seq + 1),
    "slot": lambda r: msgspec.structs.replace(r, slots=b"\x07\0\0\0" + r.slots[4:]),
    "generation": lambda r: msgspec.structs.replace(r, generations=b"\x09\0" + r.generations[2:]),
    "missing-row": lambda r: msgspec.structs.replace(
        r, slots=r.slots[4:], generations=r.generations[2:], tokens=r.tokens[4:]
    ),
    "token-out-of-vocabulary": lambda r: msgspec.structs.replace(r, tokens=b"\0\2\0\0" + r.tokens[4:]),
    "negative-token": lambda r: msgspec.structs.replace(r, tokens=b"\xff\xff\xff\xff" + r.tokens[4:]),
    "broken-tokens": lambda r: msgspec.structs.replace(r, tokens=r.tokens[:-1]),
    "too-many-tokens": lambda r: msgspec.structs.replace(
        r, tokens=r.tokens + r.tokens[:4], counts=b"\x02" + b"\x01" * (len(r.slots) // 4 - 1)
    ),
    "foreign-fault": lambda r: msgspec.structs.replace(r, faults=(step.RowFault(11, 3, 1),)),
}


@pytest.mark.parametrize("change", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_to_what_was_not_asked_costs_one_epoch(change: Any) -> None:
    world, worker, session, executor = start()
    while True:
        answer = executor.run()
        assert isinstance(answer, step.StepResult)
        if len(answer.slots) >= 8:
            break
        world.from_executor(session, answer)
    world.from_executor(session, change(answer))
    assert world.core.counters["epochs_lost"] == 1
    assert isinstance(executor.received[-1], step.Welcome)
    world.run_all()
    assert_reference(worker)


def test_a_late_answer_of_an_older_epoch_is_dropped() -> None:
    world, worker, session, executor = start()
    late = executor.run()
    assert isinstance(late, step.StepResult)
    world.from_executor(session, step.EpochLost(late.epoch, 1, step.DIGEST_MISMATCH))
    world.from_executor(session, late)
    assert world.core.counters["stale_results"] == 1
    world.from_executor(session, step.EpochLost(late.epoch, 1, step.DIGEST_MISMATCH))
    assert world.core.counters["epochs_lost"] == 1
    world.run_all()
    assert_reference(worker)


def lose(world: World, session: bytes, executor: SimExecutor, code: int = step.DIGEST_MISMATCH) -> None:
    assert executor.epoch is not None
    executor.lost = True
    world.from_executor(session, step.EpochLost(executor.epoch, executor.seq + 1, code))


def test_two_epochs_lost_in_a_row_quarantine_by_name() -> None:
    world, worker, session, executor = start(quarantine=5.0)
    lose(world, session, executor)
    world.run(session)
    lose(world, session, executor)
    refused = executor.received[-1]
    assert isinstance(refused, step.Refused)
    assert refused.retry_after == 5.0
    del world.executors[session]
    executor.instance += 1
    again, _ = world.add_executor(executor)
    assert isinstance(executor.received[-1], step.Refused)
    del world.executors[again]
    world.tick(5.1)
    world.add_executor(executor)
    assert isinstance(executor.received[-1], step.Welcome)
    world.run_all()
    assert_reference(worker)


def test_good_steps_between_two_lost_epochs_forgive_the_first() -> None:
    world, worker, session, executor = start(good_steps=5)
    for _ in range(4):
        lose(world, session, executor)
        for _ in range(6):
            world.run(session)
    world.run_all()
    assert_reference(worker)


def test_out_of_memory_shrinks_the_batch_and_suspects_nobody() -> None:
    world, worker, session, executor = start()
    budget = executor.limits.max_batch_tokens
    lose(world, session, executor, step.OUT_OF_MEMORY)
    (state,) = world.core.fleet.sessions.values()
    assert 16 <= state.token_budget <= budget // 2
    lose(world, session, executor, step.OUT_OF_MEMORY)
    assert session in world.core.fleet.sessions
    assert all(s.deaths == 0 for stream in world.core.streams.by_request.values() for s in stream.sequences.values())
    world.run_all()
    assert_reference(worker)


def test_a_hung_executor_is_given_up_and_its_sequences_go_on() -> None:
    world, worker, session, executor = start(cold_step_timeout=2.0, step_timeout_per_token=0.0)
    world.run(session)
    world.tick(1.0)
    assert session in world.core.fleet.sessions
    world.tick(1.5)
    assert session not in world.core.fleet.sessions
    assert isinstance(executor.received[-1], step.Rehello)
    late = executor.run()
    assert late is not None
    world.from_executor(session, late)
    assert world.core.counters["strangers"] == 1
    executor.queue.clear()
    world.add_executor(executor)
    del world.executors[session]
    world.run_all()
    assert_reference(worker)


@pytest.mark.parametrize("executors", [1, 3])
@pytest.mark.parametrize(("mates", "poisons"), [(0, 1), (8, 1), (60, 1), (60, 3)])
def test_only_the_requests_that_kill_fail(mates: int, poisons: int, executors: int) -> None:
    """However many run beside them, four deaths each: two beside others (shared, on one executor), two alone."""
    world = World()
    worker = world.add_worker()
    limits = msgspec.structs.replace(SMALL, max_slots=64, num_blocks=1024)
    for i in range(executors):
        world.add_executor(SimExecutor(f"e{i}", limits=limits, kill_on=frozenset({POISON})))
    submit_all(world, worker, requests(mates))
    condemned = [worker.submit([5, POISON, 6 + i], 5) for i in range(poisons)]
    alive = {executor.name: executor for executor in world.executors.values()}
    deaths = 0
    for _ in range(20_000):
        if not worker.open:
            break
        for dead in alive.keys() - {executor.name for executor in world.executors.values()}:
            deaths += 1
            alive[dead].instance += 1
            world.add_executor(alive[dead])
        if not world.run_round():
            world.tick(0.3)
    for number in condemned:
        end = worker.ends[(number, 0)]
        assert isinstance(end, front.Failed)
        assert "alone" in end.message
        del worker.submits[number]
    assert deaths <= (2 + 2 * poisons if executors == 1 else 4 * poisons)
    assert_reference(worker)


def test_a_step_that_fails_on_one_request_is_that_requests_fault() -> None:
    world = World()
    session, executor = world.add_executor(limits=SMALL, strict=False)
    worker = world.add_worker()
    submit_all(world, worker, requests(6))
    good = list(worker.submits)
    poison = worker.submit([5, 6, 7], 50, ignore_eos=True)
    for _ in range(3000):
        if not worker.open:
            break
        plan = executor.queue[0].plan if executor.queue else None
        holds = {slot for slot, state in executor.slots.items() if state.admission.request_id == "w0-7"}
        holds |= {a.slot for a in plan.admitted if a.request_id == "w0-7"} if plan else set()
        rows = set(np.frombuffer(plan.decode, "<i4").tolist()) if plan else set()
        rows |= set(np.frombuffer(plan.prefill, "<i4")[::2].tolist()) if plan else set()
        if plan is not None and rows & holds:
            lose(world, session, executor, step.STEP_FAILED)
        elif not world.run(session):
            world.tick(0.3)
    assert isinstance(worker.ends[(poison, 0)], front.Failed)
    assert session in world.core.fleet.sessions
    for number in good:
        assert isinstance(worker.ends[(number, 0)], front.Finished)


def test_a_fault_of_a_row_is_that_requests_alone() -> None:
    world = World()
    world.add_executor(limits=SMALL, fault_on=frozenset({POISON}))
    worker = world.add_worker()
    submit_all(world, worker, requests(10))
    bad = worker.submit([3, POISON, 4], 9)
    also = worker.submit([3, 4, POISON], 9)
    world.run_all()
    for number in (bad, also):
        end = worker.ends[(number, 0)]
        assert isinstance(end, front.Failed)
        assert end.code == front.INTERNAL
        assert "non-finite" in end.message
        del worker.submits[number]
    assert_reference(worker)
    assert world.core.counters["epochs_lost"] == 0


def test_frames_of_strangers_get_rehello() -> None:
    world, _ = simple_world()
    world.from_executor(b"nobody", step.Load(0, 0, 0, 0))
    assert world.sent[b"nobody"] == [step.Rehello()]
    world.from_executor(b"nobody", step.Goodbye("bye"))
    assert len(world.sent[b"nobody"]) == 1
