"""What one turn of the core may cost, and who comes to it."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from protos import step
from scheduler_svc.core import planner, prefix_cache, remains, residency
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.prefix_cache import NOTHING, PrefixCache
from scheduler_svc.core.prefix_run import Run
from tests.core.sim import SimExecutor, model_card
from tests.core.test_same_tokens import assert_reference, submit_all
from tests.core.world import SimWorker, World, simple_world


def two_models(executors: int) -> tuple[World, SimWorker, bytes]:
    """Many executors of model "a", the session of the one of model "b"."""
    world = World()
    limits = step.Limits(400, 4, 8, 64)
    for i in range(executors):
        world.add_executor(SimExecutor(f"a{i}", i + 1, model_card("a"), limits))
    rare, _ = world.add_executor(SimExecutor("b", 999, model_card("b"), limits))
    return world, world.add_worker(window=10**6), rare


def turn(world: World, answering: deque[bytes], answers: int) -> None:
    """As the shell: some frames of executors, then one `advance`, whether it comes to all or not."""
    for session in list(answering):
        if answers and (answer := world.executors[session].run()) is not None:
            answers -= 1
            answering.remove(session)
            answering.append(session)
            world.core.on_executor(session, answer, world.now)
    world.now += 0.0005
    world.core.advance(world.now)
    for destination, message in world.core.take_outbox():
        world._deliver(destination, message)


def test_a_model_with_many_executors_takes_no_turns_from_another() -> None:
    """So many answers come in every turn that plans for these alone fill it."""
    world, worker, rare = two_models(40)
    world.batching = True
    for i in range(160):
        worker.submit([i + 1, 2], 200, model="a", hashes=False, ignore_eos=True)
    worker.submit([5, 6], 100, model="b", hashes=False, ignore_eos=True)
    answering = deque(world.executors)
    for _ in range(200):
        turn(world, answering, 16)
    assert len(world.executors[rare].plans) > 40


def test_a_model_of_which_much_waits_takes_no_turns_from_another() -> None:
    """So many requests come in every turn that idle executors which take them alone fill it."""
    world, worker, rare = two_models(60)
    world.batching = True
    worker.submit([5, 6], 100, model="b", hashes=False, ignore_eos=True)
    answering = deque(world.executors)
    for _ in range(20):
        for i in range(32):
            worker.submit([i + 1, 2], 1, model="a", hashes=False)
        turn(world, answering, 32)
    assert world.executors[rare].plans


def test_a_plan_admits_no_more_than_a_turn_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_MOST_ADMITTED", 5)
    world, worker = simple_world(1, limits=step.Limits(400, 4, 64, 256))
    submit_all(world, worker, [([i + 1], 20, i) for i in range(40)])
    world.run_all()
    assert_reference(worker)
    (executor,) = world.executors.values()
    assert max(len(plan.admitted) for plan in executor.plans) == 5


# -- what is kept and given up in slices -----------------------------------------------------------------------------


def filled(blocks: int) -> tuple[BlockPool, PrefixCache, list[int], Run, list[bytes], bytes]:
    """A pool and its cache, with the blocks of one sequence, which holds them, as one run."""
    pool = BlockPool(2 * blocks)
    cache = PrefixCache(pool, 1)
    held = pool.allocate(blocks)
    tokens = b"".join(i.to_bytes(4, "little") for i in range(blocks))
    hashes = [b"%d" % i for i in range(blocks)]
    place = cache.register(hashes, None, "", tokens, held)
    assert place is not None
    return pool, cache, held, place[0], hashes, tokens


def test_the_tail_of_a_run_is_evicted_as_one_whatever_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is held, so what is evicted goes on with blocks of another run."""
    lost: list[int] = []
    true = prefix_cache._lose

    def lose(run: Run, count: int, width: int) -> None:
        lost.append(count)
        true(run, count, width)

    monkeypatch.setattr(prefix_cache, "_lose", lose)
    pool, cache, held, run, hashes, tokens = filled(1000)
    pool.share(cache.extend(NOTHING, hashes, tokens, "", 600).blocks)
    pool.release(held)
    other = pool.allocate(1000)
    cache.register([b"other"], None, "", bytes(4000), other)
    pool.release(other)
    pool.allocate(700)
    assert lost == [400, 300]
    assert cache.extend(NOTHING, hashes, tokens, "", 1000).count == len(run.blocks) == 600


def test_a_first_block_that_stays_keeps_no_long_prompt() -> None:
    pool, cache, held, run, hashes, tokens = filled(1000)
    pool.share(held[:2])
    pool.release(held)
    for _ in range(1998 // 3):
        pool.allocate(3)
        assert len(run.tokens) <= 2 * 4 * len(run.blocks)
    assert run.blocks == held[:2]
    assert cache.extend(NOTHING, hashes, tokens, "", 1000).count == 2


def test_long_runs_and_tables_are_taken_apart_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "_ITEMS_A_TURN", 10)
    world, worker = simple_world(1, limits=step.Limits(400, 4, 16, 256))
    submit_all(world, worker, [([i + 1] * 200, 4, i) for i in range(4)])
    world.run_round()
    (session,) = world.executors
    state = world.core.fleet.sessions[session]
    blocks = [*state.table.blocks[:4], *(run.blocks for run in state.cache.by_hash.values())]
    assert max(map(len, blocks)) > 40
    world.core.on_session_gone(session, world.now)
    while len(world.core.fleet.remains):
        before = sum(map(len, blocks))
        world.core.advance(world.now)
        assert before - sum(map(len, blocks)) <= 10
    assert not any(blocks)
    world.executors.clear()
    world.add_executor()
    world.run_all()
    assert_reference(worker)


def test_who_waits_does_not_remember_every_cache_that_ever_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_MOST_FOUND", 4)
    world, worker = simple_world(1, limits=step.Limits(30, 4, 8, 64), good_steps=0)
    prefix = list(range(1, 41))
    submit_all(world, worker, [([*prefix, 50 + i], 40, i) for i in range(4)])
    ((session, executor),) = world.executors.items()
    found = []
    for _ in range(20):
        world.run_round()
        assert executor.epoch is not None
        executor.lost = True
        world.from_executor(session, step.EpochLost(executor.epoch, 1, step.OUT_OF_MEMORY, "planned"))
        world.run_round()
        found += [len(sequence.found) for sequence in world.core.fleet.models["m"].queue]
    assert max(found) == 4
    world.run_all()
    assert_reference(worker)


def test_who_looks_again_does_not_go_through_the_whole_prompt() -> None:
    """It goes on with other tokens from the middle of a long run on, as it did the last time."""
    read: list[int] = []

    class Tokens(bytes):
        def __getitem__(self, index: Any) -> Any:
            read.append(len(super().__getitem__(index)))
            return super().__getitem__(index)

    _, cache, _, run, hashes, tokens = filled(1000)
    mine = tokens[:40] + b"\xff" * 3960
    found = cache.extend(NOTHING, hashes[:10] + [b"mine"] * 990, mine, "", 1000)
    assert found.count == 10
    run.tokens = Tokens(run.tokens)
    assert cache.extend(found, hashes[:10] + [b"mine"] * 990, mine, "", 1000) is found
    assert sum(read) == 4
