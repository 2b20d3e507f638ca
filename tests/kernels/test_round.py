"""Whole rounds of the worker (inputs, forward, sampling, results) on the device side and on the CPU: equal tokens.

Both get the same plans. The device side runs with overlap, and with captured graphs where a step is plain decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from executor_svc.backends.cuda.runner import CudaRunner
from executor_svc.model_runner import ModelRunner
from executor_svc.models.config import ModelConfig
from executor_svc.slots import SlotLimits, Slots
from executor_svc.worker import Worker
from protos.step import BAD_PARAMETER, NON_FINITE, EpochLost, SamplingParams, StepResult
from protos.wire import unpack_int32
from tests.executor.scripted import GREEDY, Planner
from tests.kernels.backends import make_device
from tests.kernels.stand_in import NoHostReads, StandIn
from tests.kernels.tiny_models import BLOCK_SIZE, GEMMA, LLAMA, NUM_BLOCKS, cpu_model, cuda_model

pytestmark = pytest.mark.nvrtc

MAX_SLOTS = 8
SHALLOW = dataclasses.replace(LLAMA, num_layers=1)
VOCAB = LLAMA.vocab_size


def _ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=11),
    SamplingParams(seed=12, temperature=0.7, top_k=20, top_p=0.9, logprobs=2),
    SamplingParams(seed=13, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5),
    SamplingParams(seed=14, min_tokens=5, masked_until_min_tokens=_ids(*range(0, VOCAB, 2)), allowed_ids=_ids(3, 4, 9)),
    SamplingParams(temperature=0.0, logit_bias_ids=_ids(7, 8), logit_bias=np.array([9, -50], "<f4").tobytes()),
]


class Side:
    """A worker with its model, and what it sent."""

    def __init__(self, runner: ModelRunner, overlap: bool) -> None:
        self.sent: list[StepResult | EpochLost] = []
        limits = SlotLimits(NUM_BLOCKS, BLOCK_SIZE, MAX_SLOTS, 256, VOCAB, LLAMA.context_length)
        self.worker = Worker(Slots(limits), runner, self.sent.append, overlap)


class Pair:
    """The same plans to both."""

    def __init__(self, graphs: bool, config: ModelConfig = SHALLOW) -> None:
        self.device = make_device()
        runner = CudaRunner(cuda_model(config, self.device), MAX_SLOTS)
        if graphs:
            runner.capture_graphs(4)
        self.runner = runner
        self.cpu = Side(ModelRunner(cpu_model(config), MAX_SLOTS), overlap=False)
        self.gpu = Side(runner, overlap=True)
        self.planner = Planner()
        for side in (self.cpu, self.gpu):
            side.worker.begin_epoch(self.planner.epoch)

    def run(self, **plan: Any) -> None:
        message = self.planner.plan(**plan)
        for side in (self.cpu, self.gpu):
            side.worker.execute_plan(message)

    def results(self) -> list[tuple[StepResult, StepResult]]:
        self.gpu.worker.finish_previous()
        for message in (*self.cpu.sent, *self.gpu.sent):
            assert isinstance(message, StepResult), message
        return list(zip(self.cpu.sent, self.gpu.sent, strict=True))  # type: ignore[arg-type]


def _guarded(runner: CudaRunner) -> None:
    """From now on, forward and sampling may read nothing on the host."""

    def guard(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with NoHostReads():
                return method(*args)

        return run

    runner.execute_main_model = guard(runner.execute_main_model)  # type: ignore[method-assign]
    runner.execute_sample = guard(runner.execute_sample)  # type: ignore[method-assign]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_rounds_give_the_cpus_tokens(graphs: bool) -> None:
    """Six ways of sampling; prompts in chunks beside decode, then plain decode, a slot given away while in flight."""
    pair = Pair(graphs)
    _guarded(pair.runner)
    planner, decode, blocks = pair.planner, [], iter(range(NUM_BLOCKS))
    for slot, sampling in enumerate(SAMPLINGS):
        admission = planner.admission(slot, [3 * slot + 1, 2, 3, 4, 5], [next(blocks)], sampling=sampling)
        pair.run(admitted=[admission], decode=decode, prefill=[(slot, 5)] if slot % 2 else [(slot, 3)])
        if not slot % 2:
            pair.run(decode=decode, prefill=[(slot, 2)])
        decode = [*decode, slot]
    decode = [1, 3, 4]
    pair.run(decode=decode)
    pair.run(released=[3], admitted=[planner.admission(3, [9, 8], [next(blocks)])], decode=[4, 1], prefill=[(3, 2)])
    for _ in range(3):
        pair.run(decode=[3, 1, 4])
    tokens = 0
    for cpu, gpu in pair.results():
        assert (gpu.seq, gpu.digest) == (cpu.seq, cpu.digest)
        assert (gpu.slots, gpu.generations, gpu.tokens, gpu.faults) == (cpu.slots, cpu.generations, cpu.tokens, ())
        assert [entry.slot for entry in gpu.logprobs] == [entry.slot for entry in cpu.logprobs]
        for mine, right in zip(gpu.logprobs, cpu.logprobs, strict=True):
            _same_logprobs(mine.rows, right.rows)
        tokens += len(unpack_int32(gpu.tokens))
    assert tokens == 42
    if isinstance(pair.device, StandIn):
        assert pair.device.replays == (4 if graphs else 0)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_step_is_asked_for_before_the_one_before_it_ended(graphs: bool) -> None:
    """On a device that is always late: the host waits once a step, for the step before, with the whole forward of the
    next one already asked for. So the device goes from step to step without the host. Depth 2: any plan is there by
    then."""
    pair = Pair(graphs)
    if not isinstance(pair.device, StandIn):
        pytest.skip("a real device is as late as it is: bench/decode.py measures its gaps")
    samplings = [SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[3]]  # greedy; drawn, with logprobs; with penalties
    admissions = [
        pair.planner.admission(slot, [slot + 1, 2], [slot], sampling=sampling)
        for slot, sampling in enumerate(samplings)
    ]
    pair.run(admitted=admissions, prefill=[(slot, 2) for slot in range(3)])
    before = len(pair.device.calls)
    steps = 7  # more than pinned buffers: one taken again is free
    for _ in range(steps):
        pair.run(decode=[0, 1, 2])
    calls = pair.device.calls[before:]
    sampling_kernels = ["adjust_logits", "sample_rows", "logprobs"]
    first = calls.index("adjust_logits")
    forward = calls[:first]
    assert forward == ["replay"] if graphs else forward[0] == "gather_ids"
    assert "wait" not in forward
    assert calls == forward + sampling_kernels + (steps - 1) * [*forward, "wait", *sampling_kernels]
    pair.results()
    assert pair.device.calls[before:] == [*calls, "wait"]


def _same_logprobs(mine: Any, right: Any) -> None:
    assert [(row.position, row.rank, row.top_ids) for row in mine] == [(r.position, r.rank, r.top_ids) for r in right]
    for row, expected in zip(mine, right, strict=True):
        values = np.frombuffer(row.top_values, "<f4"), np.frombuffer(expected.top_values, "<f4")
        np.testing.assert_allclose(*values, atol=2e-4)
        assert abs(row.chosen - expected.chosen) < 2e-4


def test_prompt_logprobs() -> None:
    """A prompt scored in two chunks beside a row that decodes."""
    pair = Pair(graphs=False, config=GEMMA)
    _guarded(pair.runner)
    planner = pair.planner
    pair.run(admitted=[planner.admission(0, [5, 6], [1])], prefill=[(0, 2)])
    scored = SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=1)
    pair.run(admitted=[planner.admission(1, list(range(40, 52)), [2], sampling=scored)], decode=[0], prefill=[(1, 7)])
    pair.run(decode=[0], prefill=[(1, 5)])
    scored_rows = 0
    for cpu, gpu in pair.results():
        assert (gpu.slots, gpu.tokens, gpu.faults) == (cpu.slots, cpu.tokens, ())
        for mine, right in zip(gpu.logprobs, cpu.logprobs, strict=True):
            assert mine.slot == right.slot
            _same_logprobs(mine.rows, right.rows)
            scored_rows += len(mine.rows)
    assert scored_rows == 12  # 11 prompt tokens follow another; one token was drawn


def test_faults_cost_their_rows_alone() -> None:
    """NaN logits, a bad parameter, and a row that faulted before: by status, and the others go on."""
    pair = Pair(graphs=False)
    planner = pair.planner
    bad = SamplingParams(seed=1, logit_bias_ids=_ids(1), logit_bias=b"")
    admissions = [planner.admission(s, [s + 1, 2], [s], sampling=bad if s == 2 else GREEDY) for s in range(3)]
    pair.run(admitted=admissions, prefill=[(0, 2), (1, 2), (2, 2)])
    for keys in (pair.cpu.worker.model_runner.model.ops, pair.gpu.worker.model_runner.model.ops):  # type: ignore[attr-defined]
        cache = keys.kv_tensors()[0]
        if cache.dim() == 4:
            cache[1, :, 0] = float("nan")
        else:
            cache[BLOCK_SIZE] = float("nan")
    pair.run(decode=[0, 1])
    pair.run(decode=[0, 1])
    seen = []
    for cpu, gpu in pair.results():
        assert (gpu.slots, gpu.tokens) == (cpu.slots, cpu.tokens)
        assert [(f.slot, f.status) for f in gpu.faults] == [(f.slot, f.status) for f in cpu.faults]
        seen += [(fault.slot, fault.status) for fault in gpu.faults]
    assert seen == [(2, BAD_PARAMETER), (1, NON_FINITE), (1, NON_FINITE)]


def test_a_lost_device_ends_the_process() -> None:
    """An error alone loses the epoch; one after which the device does not answer ends the process."""
    pair = Pair(graphs=False)
    if not isinstance(pair.device, StandIn):
        pytest.skip("a real device is not broken for a test")
    pair.run(admitted=[pair.planner.admission(0, [1, 2], [0])], prefill=[(0, 2)])

    def fail(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    pair.runner._forward = fail  # type: ignore[method-assign]
    step = pair.planner.plan(decode=[0])
    pair.device.broken = True
    with pytest.raises(SystemExit, match="the device is lost: forward: RuntimeError: CUDA error"):
        pair.gpu.worker.execute_plan(step)
