"""Executors come, go, drain, are refused; several models; assets by hash."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from protos import front, step
from scheduler_svc.core import models, prefix_homes, remains, routing
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.prefix_homes import PrefixHomes
from tests.core.driver import driver_of
from tests.core.sim import SimExecutor, model_card, reference
from tests.core.test_same_tokens import SMALL, assert_reference, requests, submit_all
from tests.core.world import World, simple_world


def refused(executor: SimExecutor) -> str:
    message = executor.received[-1]
    assert isinstance(message, step.Refused), message
    assert message.retry_after > 0
    return message.reason


def test_two_models_are_served_apart() -> None:
    world = World()
    world.add_executor(name="a", card=model_card("m"), limits=SMALL)
    world.add_executor(name="b", card=model_card("n", weights="c"), limits=SMALL)
    worker = world.add_worker()
    assert set(worker.models) == {"m", "n"}
    numbers = {model: [worker.submit([i + 1], 8, model=model) for i in range(6)] for model in ("m", "n")}
    world.run_all()
    for model in numbers:
        for i, number in enumerate(numbers[model]):
            assert worker.outputs[(number, 0)] == reference([i + 1], 8)


def test_conflicting_executors_are_refused_by_name() -> None:
    world, _ = simple_world()
    for card, limits, word in [
        (model_card(weights="d"), step.Limits(64, 4, 16, 64), "weights"),
        (model_card(), step.Limits(64, 8, 16, 64), "blocks of 4 tokens"),
    ]:
        session, executor = world.add_executor(name="x", instance=5, card=card, limits=limits)
        assert word in refused(executor)
        assert session not in world.core.fleet.sessions
        del world.executors[session]
    future = SimExecutor(name="y")
    world.executors[b"y"] = future
    world.from_executor(b"y", msgspec.structs.replace(future.hello(), versions=(9, 8)))
    assert "versions" in refused(future)
    del world.executors[b"y"]


@pytest.mark.parametrize(
    ("core", "executor", "spoken"),
    [
        ((1,), (1, 2), 1),
        ((1,), (2, 1), 1),
        ((2, 1), (1,), 1),
        ((2, 1), (1, 2), 2),
        ((3, 2), (2, 1), 2),
        ((1,), (2,), 0),
        ((3, 2), (1,), 0),
    ],
)
def test_the_newest_version_that_both_speak(
    core: tuple[int, ...], executor: tuple[int, ...], spoken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "PROTOCOL_VERSIONS", core)
    world = World()
    other = SimExecutor()
    world.add_executor(SimExecutor("before"))
    world.executors[b"s"] = other
    world.from_executor(b"s", msgspec.structs.replace(other.hello(), versions=executor))
    if spoken:
        assert [m.version for m in other.received if isinstance(m, step.Welcome)] == [spoken]
        return
    reason = refused(other)
    assert str(list(executor)) in reason
    assert str(core[0]) in reason
    assert len(world.core.fleet.sessions) == 1, "the one before stays"


def test_other_weights_may_follow_when_nobody_is_left() -> None:
    world, worker = simple_world()
    (session,) = world.executors
    world.kill_executor(session)
    _, executor = world.add_executor(name="new", instance=9, card=model_card(weights="d"))
    assert isinstance(executor.received[-1], step.Welcome)
    assert worker.models["m"].fingerprint == "d" * 64


def test_a_newer_session_of_the_same_process_replaces_the_older() -> None:
    world, worker = simple_world(limits=SMALL)
    submit_all(world, worker, requests(8))
    ((old, executor),) = world.executors.items()
    for _ in range(3):
        world.run(old)
    del world.executors[old]
    world.add_executor(executor)
    assert len(world.core.fleet.sessions) == 1
    world.run_all()
    assert_reference(worker)
    assert all(s.deaths == 0 for e in world.core.fleet.models.values() for s in e.queue)


def test_a_second_hello_on_a_session_starts_a_new_epoch() -> None:
    world, worker = simple_world(limits=SMALL)
    submit_all(world, worker, requests(8))
    ((session, executor),) = world.executors.items()
    for _ in range(3):
        world.run(session)
    world.from_executor(session, executor.hello())
    world.run_all()
    assert_reference(worker)


def test_draining_moves_its_sequences_to_an_equal_executor() -> None:
    world, worker = simple_world(2, limits=SMALL)
    submit_all(world, worker, requests(16))
    first, second = world.executors
    for _ in range(6):
        world.run(first)
        world.run(second)
    world.from_executor(first, step.Draining())
    while world.run(first):
        pass
    assert isinstance(world.executors[first].received[-1], step.Drain)
    world.from_executor(first, step.Goodbye("drained"))
    del world.executors[first]
    assert worker.models["m"].executors_ready == 1
    assert worker.models["m"].executors_expected == 0
    world.run_all()
    assert_reference(worker)


def test_the_last_executor_finishes_what_runs_before_it_leaves() -> None:
    world, worker = simple_world(limits=SMALL, kv_blocks_limit=17)
    submit_all(world, worker, requests(10))
    ((session, executor),) = world.executors.items()
    for _ in range(6):
        world.run(session)
    (state,) = world.core.fleet.sessions.values()
    begun = {s.stream.number for s in state.residents()}
    begun |= {s.stream.number for s in state.settling.values()}
    begun |= {s.stream.number for s in state.model.queue if s.cached_tokens >= 0}
    world.from_executor(session, step.Draining())
    assert not any(isinstance(m, step.Drain) for m in executor.received)
    while world.run(session):
        pass
    assert isinstance(executor.received[-1], step.Drain)
    assert all((number, 0) in worker.ends for number in begun)
    waiting = set(worker.open)
    world.from_executor(session, step.Goodbye("drained"))
    del world.executors[session]
    world.add_executor(name="next", instance=77, limits=SMALL)
    world.run_all()
    assert waiting
    assert_reference(worker)


def test_requests_go_where_their_prefix_is() -> None:
    world, worker = simple_world(2)
    prefix = list(range(1, 33))
    worker.submit([*prefix, 40], 3)
    world.run_all()
    (home,) = (s for s, executor in world.executors.items() if executor.rows)
    for i in range(5):
        worker.submit([*prefix, 50 + i], 3)
        world.run_all()
    assert all(executor.rows == 0 for session, executor in world.executors.items() if session != home)
    ends = [worker.ends[(number, 0)] for number in list(worker.submits)[1:]]
    assert [end.cached_tokens for end in ends] == [32] * 5  # type: ignore[union-attr]


def test_without_a_prefix_load_is_spread() -> None:
    world, worker = simple_world(2)
    submit_all(world, worker, [([i + 1] * 3, 30, i) for i in range(16)])
    assert sorted(e.table.used for e in world.core.fleet.sessions.values()) == [8, 8]
    world.run_all()
    assert_reference(worker)


def test_nobody_waits_for_an_executor_that_hangs() -> None:
    world, worker = simple_world(2, limits=step.Limits(64, 4, 2, 64))
    first, second = world.executors
    submit_all(world, worker, [([i + 1] * 3, 30, i) for i in range(2)])
    for _ in range(3):
        world.run(second)
    world.now += 1.0  # the first one does not answer
    for i in range(3):
        worker.submit([i + 9], 3)
    for _ in range(60):
        world.run(second)
    assert all((number, 0) in worker.ends for number in list(worker.submits)[2:])
    del first
    world.run_all()


# -- many executors --------------------------------------------------------------------------------------------------


def test_idle_and_busy_executors_cost_a_turn_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred, a request asks the one that takes it, and an answer its own."""
    asked: list[str] = []
    true = Planner.plan

    def plan(self: Planner, executor: ExecutorState, fleet: list[ExecutorState], now: float) -> step.StepPlan | None:
        asked.append(executor.name)
        return true(self, executor, fleet, now)

    world, worker = simple_world(100)
    monkeypatch.setattr(Planner, "plan", plan)
    number = worker.submit([1, 2, 3], 12)
    assert len(set(asked)) == 1
    home = asked[0]
    world.run_all()
    assert set(asked) == {home}
    assert worker.outputs[(number, 0)] == reference([1, 2, 3], 12)
    others = [worker.submit([i + 2], 40) for i in range(20)]
    asked.clear()
    worker.submit([99], 2)
    assert len(set(asked)) <= 2, "those that run are as deep in plans as they may be"
    world.run_all()
    assert all((other, 0) in worker.ends for other in others)


def test_in_a_large_fleet_too_requests_go_where_their_prefix_is() -> None:
    world, worker = simple_world(40)
    prefix = list(range(1, 33))
    worker.submit([*prefix, 40], 3)
    world.run_all()
    (home,) = (s for s, executor in world.executors.items() if executor.rows)
    for i in range(30):
        worker.submit([100 + i], 3)  # elsewhere
    world.run_all()
    for i in range(5):
        worker.submit([*prefix, 50 + i], 3)
        world.run_all()
    ends = [worker.ends[(number, 0)] for number in list(worker.submits)[-5:]]
    assert [end.cached_tokens for end in ends] == [32] * 5  # type: ignore[union-attr]
    world.kill_executor(home)
    again = worker.submit([*prefix, 60], 3)
    world.run_all()
    assert worker.ends[(again, 0)].cached_tokens == 0  # type: ignore[union-attr]


def test_a_short_prefix_gathers_nobody_on_a_loaded_executor() -> None:
    world, worker = simple_world(2, limits=step.Limits(400, 4, 64, 256))
    prefix = list(range(1, 9))  # two blocks
    worker.submit([*prefix, 9], 1)
    world.run_all()
    submit_all(world, worker, [([*prefix, 20 + i], 30, i) for i in range(32)])
    for _ in range(4):
        world.run_round()
    loads = sorted(e.table.used for e in world.core.fleet.sessions.values())
    assert sum(loads) == 32
    assert loads[0] >= 8
    world.run_all()
    assert_reference(worker)


@pytest.mark.parametrize("seed", range(4))
def test_anything_in_any_order_with_most_executors_not_asked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (models, routing):
        monkeypatch.setattr(module, "ASKED", 2)
    monkeypatch.setattr(routing, "_MOST_OTHERS", 1)
    driver = driver_of(seed)
    for i in range(4):
        limits = step.Limits(30, 4, 3 + i, 32)
        driver.homes.append(SimExecutor(f"more{i}", 10 + i, driver.models["m"], limits, strict=True))
        driver.world.add_executor(driver.homes[-1])
    for _ in range(500):
        driver.event()
    driver.finish()
    driver.check()


def test_the_homes_of_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_homes, "_MOST_PREFIXES", 3)
    homes = PrefixHomes()
    for i in range(20):
        homes.add(b"often", b"%d" % i)
        homes.add(b"once %d" % i, b"0")
    assert homes.of(b"often") == [b"%d" % i for i in range(12, 20)]
    assert homes.of(b"once 19") == [b"0"]
    assert homes.of(b"once 1") == []
    homes.add(b"often", b"15")
    assert homes.of(b"often")[-1] == b"15"
    assert len(homes.of(b"often")) == 8


def test_a_turn_ends_when_many_were_admitted_and_the_next_comes_at_once() -> None:
    world, worker = simple_world(8, limits=step.Limits(400, 4, 64, 16))
    world.batching = True
    for i in range(300):
        worker.submit([i + 1], 1)
    turns, core = [], world.core
    while True:
        core.advance(world.now)
        items = core.take_outbox()
        plans = [message for _, message in items if isinstance(message, step.StepPlan)]
        turns.append(sum(len(plan.admitted) for plan in plans))
        deadline = core.next_deadline()
        assert core.has_more_to_plan == (deadline is not None and deadline <= world.now)
        if not core.has_more_to_plan:
            break
    assert max(turns) < 32 + 16, "what one plan brings beyond the bound"
    assert sum(turns) == 8 * 2 * 16, "every pipeline is full"


def test_what_a_dead_executor_held_is_taken_apart_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "_ITEMS_A_TURN", 10)
    world, worker = simple_world(2, limits=step.Limits(400, 4, 16, 256))
    submit_all(world, worker, [([i + 1] * 40, 4, i) for i in range(16)])
    world.run_all()
    session = next(s for s, executor in world.executors.items() if executor.rows)
    cache = world.core.fleet.sessions[session].cache
    runs = len(cache.by_hash)
    assert runs > 4
    world.kill_executor(session)
    turns = 0
    while len(world.core.fleet.remains):
        before = len(cache.by_hash)
        world.settle()
        assert before - len(cache.by_hash) <= 10
        turns += 1
    assert turns > 4
    assert not cache.by_hash
    submit_all(world, worker, [([i + 1] * 40, 4, i) for i in range(16)])
    world.run_all()
    assert_reference(worker)


@pytest.mark.parametrize("size", [0, 1, 1000, 600_000])
def test_assets_are_fetched_by_hash_verified_and_served(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    sha256 = hashlib.sha256(data).hexdigest()
    card = msgspec.structs.replace(model_card(), assets=(step.Asset("tokenizer.json", sha256, size),))
    world = World(asset_chunk=4096 if size < 100_000 else 256 * 1024)
    worker = world.add_worker()
    session, _ = world.add_executor(card=card, assets={sha256: data})
    world.kill_executor(session)  # what was fetched stays
    got = bytearray()
    while True:
        worker.messages.clear()
        worker.send(front.FetchAsset(sha256, len(got), 100_000))
        (chunk,) = (m for m in worker.messages if isinstance(m, front.AssetChunk))
        assert (chunk.total, chunk.offset) == (size, len(got))
        got += chunk.data
        if len(got) == size:
            break
    assert bytes(got) == data


def test_an_asset_that_does_not_hash_to_its_name_is_not_served() -> None:
    sha256 = hashlib.sha256(b"right").hexdigest()
    card = msgspec.structs.replace(model_card(), assets=(step.Asset("tokenizer.json", sha256, 5),))
    world = World()
    worker = world.add_worker()
    world.add_executor(name="liar", card=card, assets={sha256: b"wrong"})
    worker.send(front.FetchAsset(sha256, 0, 100))
    chunk = worker.messages[-1]
    assert isinstance(chunk, front.AssetChunk)
    assert (chunk.total, chunk.data) == (0, b"")
    world.add_executor(name="honest", instance=2, card=card, assets={sha256: b"right"})
    worker.send(front.FetchAsset(sha256, 0, 100))
    chunk = worker.messages[-1]
    assert isinstance(chunk, front.AssetChunk)
    assert chunk.data == b"right"


def test_unknown_assets_are_answered() -> None:
    _, worker = simple_world()
    worker.send(front.FetchAsset("e" * 64, 0, 100))
    chunk = worker.messages[-1]
    assert isinstance(chunk, front.AssetChunk)
    assert chunk.total == 0


def test_an_executor_that_vanished_is_expected_back_for_a_while() -> None:
    world, worker = simple_world(expect_executor_for=50.0, forget_model_after=100.0)
    (session,) = world.executors
    world.kill_executor(session)
    assert (worker.models["m"].executors_ready, worker.models["m"].executors_expected) == (0, 1)
    assert worker.models["m"].max_sequence_tokens == 256
    world.tick(52.0)
    assert worker.models["m"].executors_expected == 0
    world.tick(60.0)
    assert "m" not in worker.models
