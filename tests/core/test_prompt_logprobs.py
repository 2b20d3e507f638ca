"""What the core decides about prompt logprobs: who computes them, how many in a plan, and what may be delivered.

That their values are right under every schedule is tested with a real model (tests/executor/model/test_logprobs.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protos import front, step
from protos.wire import unpack_int32
from tests.core.sim import SimExecutor
from tests.core.world import SimWorker, World, simple_world

LARGE = step.Limits(400, 16, 16, 2048)


def asks(top: int = 0) -> step.SamplingParams:
    return step.SamplingParams(prompt_logprobs=top)


def scored(answer: step.ToCore | None, slot: int, positions: range) -> step.StepResult:
    """The answer with logprobs of these positions of a slot's first tenant."""
    assert isinstance(answer, step.StepResult)
    rows = tuple(step.RowLogprobs(position, -0.5, 1) for position in positions)
    return msgspec.structs.replace(answer, logprobs=(step.SlotLogprobs(slot, 1, rows),))


def world_of(**config: Any) -> tuple[World, SimWorker, bytes, SimExecutor]:
    world, worker = simple_world(limits=LARGE, **config)
    ((session, executor),) = world.executors.items()
    return world, worker, session, executor


def prefilled(executor: SimExecutor) -> dict[int, int]:
    """Slot -> count of the prefill rows of the plan that runs next."""
    rows = unpack_int32(executor.queue[0].plan.prefill).tolist()
    return dict(zip(rows[0::2], rows[1::2], strict=True))


def test_a_plan_asks_for_a_bounded_number_of_values() -> None:
    world, worker, _, executor = world_of()
    world.batching = True
    for first, sampling in enumerate((asks(1024), asks(1024), asks(0), None)):
        worker.submit(list(range(1 + first, 401 + first)), 2, sampling=sampling)
    world.batching = False
    world.settle()
    counts = prefilled(executor)
    assert counts.pop(3) == 400  # who asks for none is not held up
    assert 250 <= counts.pop(0) <= 255
    assert 1 not in counts
    assert counts.get(2, 0) <= 400


def test_without_credit_no_prompt_logprobs_are_computed() -> None:
    world, _, session, executor = world_of(max_prefill_chunk=10)
    worker = world.add_worker("slow", window=1, auto_credit=False)
    number = worker.submit([1, 2, 3], 5, ignore_eos=True)
    world.run(session)
    assert worker.outputs[(number, 0)]
    worker.submit(list(range(1, 41)), 2, sampling=asks())
    assert not executor.queue
    worker.give_credit()
    assert executor.queue


def test_the_first_choice_computes_them_before_the_others_start() -> None:
    world, worker, session, executor = world_of(max_prefill_chunk=16)
    number = worker.submit(list(range(1, 41)), 3, outputs={i: [] for i in range(3)}, sampling=asks(), ignore_eos=True)
    for start in (0, 16):
        answer = executor.run()
        world.from_executor(session, scored(answer, 0, range(start + 1, start + 17)))
        assert {slot for plan in executor.plans for slot in (a.slot for a in plan.admitted)} == {0}
    world.from_executor(session, scored(executor.run(), 0, range(33, 40)))
    world.run_all()
    admitted = [admission for plan in executor.plans for admission in plan.admitted]
    assert [admission.choice for admission in admitted] == [0, 1, 2]
    assert [admission.prompt_scored for admission in admitted] == [1, 40, 40]
    assert admitted[1].computed == admitted[2].computed == 32  # the blocks that the first filled
    assert all(isinstance(worker.ends[(number, i)], front.Finished) for i in range(3))


@pytest.mark.parametrize("positions", [range(2, 17), range(16), range(17, 18), range(1, 1)])
def test_positions_out_of_turn_cost_the_epoch(positions: range) -> None:
    """Nothing of them is delivered. None at all is no fault: they come when they come."""
    world, worker, session, executor = world_of(max_prefill_chunk=16)
    number = worker.submit(list(range(1, 41)), 2, sampling=asks(), ignore_eos=True)
    epoch = executor.epoch
    world.from_executor(session, scored(executor.run(), 0, positions))
    assert (executor.epoch != epoch) == (len(positions) > 0)
    assert not any(message.logprobs for message in worker.messages if isinstance(message, front.Tokens))
    world.run_all()
    assert isinstance(worker.ends[(number, 0)], front.Finished)


def test_a_repeated_position_costs_the_epoch_and_comes_once() -> None:
    world, worker, session, executor = world_of(max_prefill_chunk=16)
    worker.submit(list(range(1, 41)), 2, sampling=asks(), ignore_eos=True)
    epoch = executor.epoch
    world.from_executor(session, scored(executor.run(), 0, range(1, 17)))
    assert executor.epoch == epoch
    world.from_executor(session, scored(executor.run(), 0, range(16, 32)))
    assert executor.epoch != epoch
    (delivered,) = (m for m in worker.messages if isinstance(m, front.Tokens) and m.logprobs)
    rows = msgspec.msgpack.decode(delivered.logprobs[0][2], type=tuple[step.RowLogprobs, ...])
    assert [row.position for row in rows] == list(range(1, 17))
    world.settle()
    assert executor.queue[0].plan.admitted[0].prompt_scored == 17
