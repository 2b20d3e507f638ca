"""Logprobs of prompts and outputs equal transformers through the core and the executor, and each comes exactly once:
plain, in chunks, with a prefix cache, after preemption, after a death and continued by the client."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from protos import front, step
from protos.wire import pack_int32, unpack_int32
from scheduler_svc.core.residency import Residency
from tests.core.world import SimWorker, World
from tests.executor.model.served import ModelExecutor

BLOCKS, BLOCK_SIZE = 128, 16
TOLERANCE = 1e-4
TOP = 3

_decode = msgspec.msgpack.Decoder(tuple[step.RowLogprobs, ...]).decode
SHARED = np.random.default_rng(7).integers(3, 384, 70).tolist()


def prompt(length: int, seed: int, shared: bool = False) -> list[int]:
    own: list[int] = np.random.default_rng(seed).integers(3, 384, length).tolist()
    return SHARED + own if shared else own


# (prompt, outputs, what is asked for, choices)
REQUESTS: list[tuple[list[int], int, dict[str, Any], int]] = [
    (prompt(1, 1), 12, {"temperature": 0.0, "logprobs": TOP, "prompt_logprobs": TOP}, 1),
    (prompt(180, 2), 20, {"seed": 4, "logprobs": TOP, "prompt_logprobs": TOP}, 1),
    (prompt(9, 3, True), 33, {"seed": 5, "temperature": 0.7, "top_k": 20, "logprobs": TOP}, 1),
    (prompt(20, 4, True), 20, {"seed": 6, "prompt_logprobs": 0}, 1),
    (prompt(37, 5, True), 20, {"seed": 7, "logprobs": TOP, "prompt_logprobs": TOP}, 3),
    (prompt(130, 6), 20, {"seed": 8, "repetition_penalty": 1.4, "presence_penalty": 1.0, "logprobs": 0}, 1),
    (
        prompt(3, 7, True),
        25,
        {
            "seed": 9, "logprobs": TOP, "prompt_logprobs": TOP, "allowed_ids": pack_int32(range(3, 300, 3)),
            "logit_bias_ids": pack_int32([3, 9]), "logit_bias": np.array([5.0, -np.inf], "<f4").tobytes(),
        },
        2,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    """``reference(ids)``: float64 log probabilities [len(ids), V] of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)

    return logprobs


@pytest.fixture
def served(tiny: Path, load: Any) -> Any:
    """``served(**config)``: a world whose one executor runs the tiny model, and an API worker."""

    def make(**config: Any) -> tuple[World, SimWorker, ModelExecutor]:
        world = World(**config)
        model = load(tiny, "float32", "numba", threads=1, blocks=BLOCKS, block_size=BLOCK_SIZE)
        executor = ModelExecutor(model, step.Limits(BLOCKS, BLOCK_SIZE, 16, 256))
        world.add_executor(executor)
        return world, world.add_worker(), executor

    return make


def submit_all(world: World, worker: SimWorker, requests: list[Any] = REQUESTS) -> None:
    world.batching = True
    for ids, max_tokens, asked, choices in requests:
        sampling = step.SamplingParams(**asked)
        worker.submit(ids, max_tokens, outputs={i: [] for i in range(choices)}, sampling=sampling, ignore_eos=True)
    world.batching = False
    world.settle()


def received(worker: SimWorker) -> dict[tuple[int, int], list[step.RowLogprobs]]:
    """(stream, choice) -> rows in the order in which they came; prompt rows before any token of their stream."""
    rows: dict[tuple[int, int], list[step.RowLogprobs]] = defaultdict(list)
    with_tokens: set[int] = set()
    for message in worker.messages:
        if not isinstance(message, front.Tokens):
            continue
        for stream, choice, data in message.logprobs:
            prompt_len = len(worker.submits[stream].prompt) // 4
            for row in _decode(data):
                assert row.position >= prompt_len or stream not in with_tokens
                rows[(stream, choice)].append(row)
        with_tokens.update(unpack_int32(message.streams).tolist())
    return rows


def check(worker: SimWorker, reference: Any) -> None:
    """Every row that was asked for came once, in order, with the values of the reference."""
    rows = received(worker)
    for number, submit in worker.submits.items():
        ids, asked = unpack_int32(submit.prompt).tolist(), submit.sampling
        for at, choice in enumerate(submit.choices):
            key = (number, choice.index)
            end = worker.ends[key]
            assert isinstance(end, front.Finished), end
            tokens = ids + worker.outputs[key]
            expected = []
            if asked.prompt_logprobs >= 0 and at == 0:
                expected += [(p, asked.prompt_logprobs) for p in range(1, len(ids))]
            if asked.logprobs >= 0:
                first = len(ids) + len(choice.outputs) // 4
                expected += [(p, asked.logprobs) for p in range(first, len(tokens))]
            assert [row.position for row in rows[key]] == [position for position, _ in expected]
            compare(rows[key], tokens, [top for _, top in expected], reference(tokens))


def compare(rows: list[step.RowLogprobs], tokens: list[int], tops: list[int], expected: torch.Tensor) -> None:
    for row, top in zip(rows, tops, strict=True):
        wide = expected[row.position - 1]
        value = float(wide[tokens[row.position]])
        assert row.chosen == pytest.approx(value, abs=TOLERANCE)
        lower = int((wide > value + TOLERANCE).sum()) + 1
        assert lower <= row.rank <= int((wide > value - TOLERANCE).sum())
        best = torch.topk(wide, top)
        values = np.frombuffer(row.top_values, "<f4")
        assert len(unpack_int32(row.top_ids)) == top
        assert values == pytest.approx(best.values.numpy(), abs=TOLERANCE)
        assert wide[unpack_int32(row.top_ids).tolist()].numpy() == pytest.approx(values, abs=TOLERANCE)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"prefix_cache": False},
    "cached": {},
    "chunk-7": {"max_prefill_chunk": 7, "depth": 3},
    "chunk-1": {"max_prefill_chunk": 1, "max_batch_tokens": 9},
    "preempting": {"kv_blocks_limit": 15},
    "preempting-chunk-20": {"kv_blocks_limit": 15, "max_prefill_chunk": 20, "depth": 3},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_schedule(served: Any, reference: Any, config: dict[str, Any]) -> None:
    world, worker, executor = served(**config)
    submit_all(world, worker)
    world.run_all()
    check(worker, reference)
    if "kv_blocks_limit" in config:
        assert world.core.residency.preemptions > 0
    if not config:
        assert world.core.residency.prefix_hits > 0
        # A second time: what is cached is found by those that ask for no prompt logprobs, and by no others.
        before = {number: end.cached_tokens for (number, _), end in worker.ends.items()}
        submit_all(world, worker)
        world.run_all()
        check(worker, reference)
        for (number, choice), end in worker.ends.items():
            if number not in before and choice == 0:
                scores = worker.submits[number].sampling.prompt_logprobs >= 0
                assert (end.cached_tokens == 0) == scores
    del executor


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 9, 25])
def test_after_a_death(served: Any, reference: Any, rounds: int) -> None:
    """It dies with plans unanswered, comes back empty, and goes on where delivery stopped."""
    world, worker, executor = served(max_prefill_chunk=50, max_batch_tokens=80)
    submit_all(world, worker)
    for _ in range(rounds):
        assert world.run_round()
    (session,) = world.executors
    world.kill_executor(session)
    world.add_executor(executor)
    world.run_all()
    check(worker, reference)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5])
def test_preempted_in_the_middle_of_its_prompt(served: Any, reference: Any, rounds: int) -> None:
    """With a chunk unanswered: if it does not end the prompt, its logprobs come again, else they count."""
    world, worker, executor = served(max_prefill_chunk=40)
    request = (prompt(180, 2), 8, {"seed": 4, "logprobs": TOP, "prompt_logprobs": TOP}, 1)
    submit_all(world, worker, [request])
    for _ in range(rounds):
        assert world.run_round()
    (state,) = world.core.fleet.sessions.values()
    (sequence,) = state.residents()
    assert state.inflight
    residency: Residency = world.core.residency
    residency.preempt(state, sequence, world.now)
    world.settle()
    world.run_all()
    check(worker, reference)
    scored = sum(count for plan in executor.plans for _, count in unpack_int32(plan.prefill).reshape(-1, 2).tolist())
    assert scored < 2 * 180  # blocks that the cache kept are found up to where delivery had come


@pytest.mark.parametrize("k", [1, 2, 16, 17, 30])
def test_continued_by_the_client(served: Any, reference: Any, k: int) -> None:
    """Outputs that came before are not scored again; those that follow are those of the whole."""
    asked: dict[str, Any] = {"seed": 5, "temperature": 0.7, "logprobs": TOP, "presence_penalty": 0.5}
    world, worker, _ = served(max_prefill_chunk=33)
    submit_all(world, worker, [(prompt(40, 3), 33, asked, 1)])
    world.run_all()
    whole, rows = worker.outputs[(1, 0)], received(worker)[(1, 0)]
    number = worker.submit(
        prompt(40, 3), 33, outputs={0: whole[:k]}, sampling=step.SamplingParams(**asked), ignore_eos=True
    )
    world.run_all()
    assert worker.outputs[(number, 0)] == whole
    assert received(worker)[(number, 0)] == rows[k:]
    check(worker, reference)
