"""Order, budget, sharing, preemption, and that something always moves."""

from __future__ import annotations

import pytest

from protos import step
from protos.wire import unpack_int32
from tests.core.sim import reference
from tests.core.test_same_tokens import assert_reference, submit_all
from tests.core.world import SimWorker, World, simple_world


def order_of_first_tokens(world: World, worker: SimWorker) -> list[int]:
    order: list[int] = []
    (session,) = world.executors
    while worker.open:
        world.run(session)
        for (number, _), outputs in worker.outputs.items():
            if outputs and number not in order:
                order.append(number)
    return order


def test_priority_then_arrival() -> None:
    world, worker = simple_world(limits=step.Limits(64, 4, 1, 64))
    blocker = worker.submit([1], 5, ignore_eos=True)
    late = worker.submit([2], 2, priority=1)
    plain = worker.submit([3], 2)
    second = worker.submit([4], 2)
    urgent = worker.submit([5], 2, priority=-1)
    assert order_of_first_tokens(world, worker) == [blocker, urgent, plain, second, late]


def test_waiting_makes_up_for_priority() -> None:
    world, worker = simple_world(limits=step.Limits(64, 4, 1, 64), ageing=10.0)
    blocker = worker.submit([1], 5, ignore_eos=True)
    patient = worker.submit([2], 2, priority=2, arrival=world.now - 25.0)
    plain = worker.submit([3], 2)
    assert order_of_first_tokens(world, worker) == [blocker, patient, plain]


def test_continuations_go_before_new_work() -> None:
    world, worker = simple_world(limits=step.Limits(64, 4, 1, 64))
    blocker = worker.submit([1], 5, ignore_eos=True)
    new = worker.submit([2], 3)
    continued = worker.submit([3], 3, outputs={0: reference([3], 1)}, priority=5)
    (session,) = world.executors
    while (continued, 0) not in worker.ends:
        world.run(session)
    assert not worker.outputs[(new, 0)]
    assert (blocker, 0) in worker.ends
    world.run_all()


@pytest.mark.parametrize("chunk", [0, 16])
def test_a_shared_prefix_is_computed_once(chunk: int) -> None:
    world, worker = simple_world(limits=step.Limits(2000, 16, 64, 4096), max_prefill_chunk=chunk)
    prefix = [1 + i % 500 for i in range(512)]
    submit_all(world, worker, [([*prefix, 1 + i, 2 + i], 4, i) for i in range(32)])
    world.run_all()
    assert_reference(worker)
    (executor,) = world.executors.values()
    assert executor.prefill_tokens == 512 + 32 * 2


def test_waiting_for_a_prefix_is_bounded() -> None:
    world, worker = simple_world(limits=step.Limits(2000, 4, 64, 64), max_prefill_chunk=4, prefix_wait=1.0)
    prefix = list(range(1, 101))
    worker.submit([*prefix, 1], 2)
    other = worker.submit([*prefix, 2], 2)
    (session,) = world.executors
    for _ in range(5):
        world.run(session)
        world.now += 0.4
    assert any(s.stream.number == other for s in world.core.fleet.sessions[session].residents())
    world.run_all()
    assert_reference(worker)


def test_tenants_do_not_share() -> None:
    world, worker = simple_world()
    prompt = list(range(1, 30))
    first = worker.submit(prompt, 2, tenant="a")
    world.run_all()
    second = worker.submit(prompt, 2, tenant="b")
    world.run_all()
    third = worker.submit(prompt, 2, tenant="a")
    world.run_all()
    cached = [worker.ends[(number, 0)].cached_tokens for number in (first, second, third)]  # type: ignore[union-attr]
    assert cached == [0, 0, 28]


def test_a_whole_cached_prompt_still_computes_one_token() -> None:
    world, worker = simple_world()
    prompt = list(range(1, 33))  # eight full blocks
    for expected in (0, 28):
        number = worker.submit(prompt, 3)
        world.run_all()
        assert worker.ends[(number, 0)].cached_tokens == expected  # type: ignore[union-attr]
        assert worker.outputs[(number, 0)] == reference(prompt, 3)


def test_the_head_of_a_prefix_outlives_its_tail() -> None:
    world, worker = simple_world(limits=step.Limits(12, 4, 4, 64))
    prompt = list(range(1, 33))
    worker.submit(prompt, 2)
    world.run_all()
    worker.submit([400 + i for i in range(24)], 2)  # evicts some of the first prompt's eight blocks
    world.run_all()
    again = worker.submit(prompt, 2)
    world.run_all()
    cached = worker.ends[(again, 0)].cached_tokens  # type: ignore[union-attr]
    assert 0 < cached < 28


def test_slots_that_are_full_cost_the_running_rows_no_budget() -> None:
    world, worker = simple_world(limits=step.Limits(400, 4, 8, 8))
    submit_all(world, worker, [([i + 1], 30, i) for i in range(12)])
    (session,) = world.executors
    for _ in range(12):
        world.run(session)
    (executor,) = world.executors.values()
    assert max(len(plan.decode) // 4 for plan in executor.plans) == 8
    world.run_all()
    assert_reference(worker)


def test_outputs_are_found_by_the_next_turn() -> None:
    world, worker = simple_world()
    prompt = list(range(1, 11))
    first = worker.submit(prompt, 20, ignore_eos=True)
    world.run_all()
    turn = [*prompt, *worker.outputs[(first, 0)], 7, 8]
    second = worker.submit(turn, 4)
    world.run_all()
    assert worker.ends[(second, 0)].cached_tokens == 28  # type: ignore[union-attr] # 29 of 30 tokens have KV
    assert_reference(worker)


def test_bypassing_the_cache_neither_reads_nor_leaves() -> None:
    world, worker = simple_world()
    prompt = list(range(1, 30))
    for bypass in (True, False, True):
        number = worker.submit(prompt, 2, bypass_cache=bypass)
        world.run_all()
        assert worker.ends[(number, 0)].cached_tokens == 0  # type: ignore[union-attr]


def test_every_plan_respects_the_budget_and_decode_goes_first() -> None:
    world, worker = simple_world(limits=step.Limits(400, 4, 16, 20))
    submit_all(world, worker, [([i + 1] * 30, 12, i) for i in range(10)])
    world.run_all()
    assert_reference(worker)
    (executor,) = world.executors.values()
    mixed = 0
    for plan in executor.plans:
        prefill = unpack_int32(plan.prefill)[1::2].sum()
        assert len(plan.decode) // 4 + prefill <= 20
        mixed += bool(len(plan.decode)) and bool(prefill)
    assert mixed > 3


def test_rows_beyond_the_budget_take_turns() -> None:
    world, worker = simple_world(limits=step.Limits(400, 4, 16, 5))
    submit_all(world, worker, [([i + 1], 40, i) for i in range(12)])
    (session,) = world.executors
    for _ in range(40):
        world.run(session)
    running = [len(outputs) for key, outputs in worker.outputs.items() if key not in worker.ends]
    assert max(running) - min(running) <= 6
    world.run_all()
    assert_reference(worker)


def test_a_preempted_sequence_makes_progress_before_it_is_preempted_again() -> None:
    world, worker = simple_world(limits=step.Limits(14, 4, 8, 64))
    submit_all(world, worker, [([i + 1] * 5, 40, i) for i in range(8)])
    world.run_all()
    assert_reference(worker)
    assert 0 < world.core.residency.preemptions < 8 * 40


def test_tokens_in_flight_at_a_preemption_still_count() -> None:
    world, worker = simple_world(limits=step.Limits(14, 4, 8, 64), depth=3)
    world.batching = True
    for i in range(8):
        worker.submit([i + 1] * 5, 40, seed=i, ignore_eos=True)
    world.batching = False
    world.settle()
    world.run_all()
    assert_reference(worker)
    assert world.core.residency.preemptions > 0
    assert world.core.committer.dropped_rows == 0  # nothing ended early, so every row that ran was of use


@pytest.mark.parametrize("blocks", [11, 12, 13, 15])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_that_just_fit_alone_both_end(blocks: int, depth: int) -> None:
    world, worker = simple_world(limits=step.Limits(blocks, 4, 8, 64), depth=depth)
    submit_all(world, worker, [([i + 1] * 4, 40, i) for i in range(3)])
    world.run_all()
    assert_reference(worker)


def test_a_plan_that_only_releases_goes_out_when_nothing_else_would_carry_it() -> None:
    world, worker = simple_world()
    worker.submit([1, 2], 1)
    world.run_all()
    (executor,) = world.executors.values()
    assert not executor.slots
    assert unpack_int32(executor.plans[-1].released).tolist() == [0]
    assert not executor.plans[-1].decode
