"""Whatever the schedule, the tokens are those of a request that runs alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from protos import front, step
from tests.core.sim import reference
from tests.core.world import SimWorker, World, simple_world

SMALL = step.Limits(40, 4, 16, 64)  # 40 blocks of 4 tokens: eight requests of 40 tokens do not fit together


def requests(count: int, seed: int = 1) -> list[tuple[list[int], int, int]]:
    """(prompt, max_tokens, seed): some share a prefix of 12 tokens."""
    draw = random.Random(seed)
    shared = [draw.randrange(1, 500) for _ in range(12)]
    result = []
    for i in range(count):
        prompt = [draw.randrange(1, 500) for _ in range(draw.randrange(1, 24))]
        if i % 2:
            prompt = shared + prompt
        result.append((prompt, draw.randrange(1, 40), draw.randrange(1000)))
    return result


def submit_all(world: World, worker: SimWorker, wanted: list[tuple[list[int], int, int]]) -> None:
    world.batching = True
    for prompt, max_tokens, seed in wanted:
        worker.submit(prompt, max_tokens, seed=seed)
    world.batching = False
    world.settle()


def assert_reference(worker: SimWorker) -> None:
    for number, submit in worker.submits.items():
        for choice in submit.choices:
            end = worker.ends[(number, choice.index)]
            assert isinstance(end, front.Finished), end
            expected = expected_outputs(submit, choice.index)
            assert worker.outputs[(number, choice.index)] == expected
            assert end.outputs == len(expected)
            last_is_eos = expected[-1] == 0 and not submit.ignore_eos
            assert end.reason == (front.STOP_EOS if last_is_eos else front.LENGTH)
            assert end.stop_token == (0 if last_is_eos else -1)


def expected_outputs(submit: front.Submit, choice: int) -> list[int]:
    prompt = list(memoryview(submit.prompt).cast("i"))
    return reference(prompt, submit.max_tokens, seed=submit.sampling.seed, choice=choice, ignore_eos=submit.ignore_eos)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "depth-1": {"depth": 1},
    "depth-3": {"depth": 3},
    "chunk-1": {"max_prefill_chunk": 1},
    "chunk-7": {"max_prefill_chunk": 7},
    "chunk-7-depth-3": {"max_prefill_chunk": 7, "depth": 3},
    "chunk-64": {"max_prefill_chunk": 64},
    "no-cache": {"prefix_cache": False},
    "tight-budget": {"max_batch_tokens": 3},
    "budget-1": {"max_batch_tokens": 1},
    "preempting": {"kv_blocks_limit": 17},
    "preempting-depth-3": {"kv_blocks_limit": 17, "depth": 3},
    "preempting-chunk-1": {"kv_blocks_limit": 17, "max_prefill_chunk": 1},
    "preempting-no-cache": {"kv_blocks_limit": 17, "prefix_cache": False},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("count", [1, 20])
def test_every_schedule_gives_the_same_tokens(config: dict[str, Any], count: int) -> None:
    world, worker = simple_world(limits=SMALL, **config)
    submit_all(world, worker, requests(count))
    world.run_all()
    assert_reference(worker)
    if "kv_blocks_limit" in config and count > 1:
        assert world.core.residency.preemptions > 0


@pytest.mark.parametrize("executors", [2, 3])
def test_several_executors(executors: int) -> None:
    world, worker = simple_world(executors, limits=SMALL)
    submit_all(world, worker, requests(30))
    world.run_all()
    assert_reference(worker)
    assert all(executor.rows > 0 for executor in world.executors.values())


@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, 20])
def test_continued_from_the_first_k_tokens(k: int) -> None:
    world, worker = simple_world(limits=SMALL)
    prompt = list(range(1, 12))
    whole = reference(prompt, 30, seed=3, ignore_eos=True)
    number = worker.submit(prompt, 30, outputs={0: whole[:k]}, seed=3, ignore_eos=True)
    world.run_all()
    assert worker.outputs[(number, 0)] == whole


def test_a_continuation_that_is_over_ends_at_once() -> None:
    world, worker = simple_world(limits=SMALL)
    full = worker.submit([1, 2, 3], 4, outputs={0: [5, 6, 7, 8]})
    eos = worker.submit([1, 2, 3], 9, outputs={0: [5, 0]})
    stopped = worker.submit([1, 2, 3], 9, outputs={0: [5, 77]}, stop_ids=b"\x4d\0\0\0")
    world.drain_plans()
    reasons = {number: worker.ends[(number, 0)].reason for number in (full, eos, stopped)}  # type: ignore[union-attr]
    assert reasons == {full: front.LENGTH, eos: front.STOP_EOS, stopped: front.STOP_ID}


def test_choices_share_their_prompt_and_differ() -> None:
    world, worker = simple_world()
    prompt = list(range(1, 42))
    number = worker.submit(prompt, 10, outputs={i: [] for i in range(5)}, seed=9)
    world.run_all()
    assert_reference(worker)
    assert len({tuple(worker.outputs[(number, i)]) for i in range(5)}) > 1
    (executor,) = world.executors.values()
    assert executor.prefill_tokens < 41 + 5 * 4  # four tokens a block: all but the last block is computed once


def test_stop_ids_and_ignored_eos() -> None:
    world, worker = simple_world()
    whole = reference([7, 8], 200, ignore_eos=True)
    stop = whole[30]
    first = whole.index(stop)
    number = worker.submit([7, 8], 200, ignore_eos=True, stop_ids=stop.to_bytes(4, "little"))
    free = worker.submit([7, 8], 100, ignore_eos=True)
    world.run_all()
    end = worker.ends[(number, 0)]
    assert isinstance(end, front.Finished)
    assert (end.reason, end.stop_token, end.outputs) == (front.STOP_ID, stop, first + 1)
    assert worker.outputs[(number, 0)] == whole[: first + 1]
    assert worker.outputs[(free, 0)] == whole[:100]
