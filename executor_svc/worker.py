"""The worker's round: one plan in, one result out, in this order.

::

    round n      prepare_inputs(n)    forward(n)    post_process(n-1)  sample(n)
    round n+1    prepare_inputs(n+1)  forward(n+1)  post_process(n)    sample(n+1)

With overlap, step n's tokens reach the host while the device runs forward n+1. Without, each step is post-processed in
its own round. Both give the same tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from executor_svc.errors import PlanError
from executor_svc.inputs import prepare_inputs
from executor_svc.metadata import StepMetadata
from executor_svc.model_runner import ModelRunner
from executor_svc.sampling.sampler import Sampled, SamplerOutput
from executor_svc.slots import Slots
from protos.step import STEP_FAILED, EpochLost, StepPlan, StepResult
from protos.wire import LE_INT32, LE_UINT16, Epoch

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class StepState:
    """A step that was sampled and not yet post-processed. It holds its sequences themselves (slots, generations and
    the objects that rules need): by now the slot tables may already describe a later plan."""

    metadata: StepMetadata
    sampled: Sampled
    started: float  # time.perf_counter() when its round began


class Worker:
    """Owns the order of a round. ``send`` takes StepResult and EpochLost messages."""

    def __init__(
        self,
        slots: Slots,
        model_runner: ModelRunner,
        send: Callable[[StepResult | EpochLost], None],
        overlap: bool = False,
    ) -> None:
        self.slots = slots
        self.model_runner = model_runner
        self.send = send
        self.overlap = overlap
        self.previous: StepState | None = None
        self.steps = 0
        self.lost = True  # no plan is run before the first epoch, nor after a lost one

    def begin_epoch(self, epoch: Epoch) -> None:
        """Forget everything: results of an older epoch have no reader any more."""
        self.previous = None
        self.slots.clear(epoch)
        self.model_runner.clear()
        self.lost = False

    def execute_plan(self, plan: StepPlan) -> None:
        """Run one plan. One of a dead epoch is ignored; one that fails as a whole loses the epoch."""
        if self.lost or plan.epoch != self.slots.epoch:
            return
        try:
            self.execute_model_step(plan)
        except PlanError as error:
            self._lose_epoch(plan, error.code, error.detail)
        except Exception as error:  # a defect of ours: the core continues these sequences, here or elsewhere
            log.exception("step failed", extra={"seq": plan.seq})
            self._lose_epoch(plan, STEP_FAILED, f"{type(error).__name__}: {error}")

    def _lose_epoch(self, plan: StepPlan, code: int, detail: str) -> None:
        self.finish_previous()  # the step before was good: its tokens count
        self.lost = True
        log.warning("epoch lost", extra={"seq": plan.seq, "code": code, "detail": detail})
        self.send(EpochLost(epoch=plan.epoch, seq=plan.seq, code=code, detail=detail[:4096]))

    def execute_model_step(self, message: StepPlan) -> None:
        started = time.perf_counter()
        plan = self.slots.apply(message)
        metadata = prepare_inputs(plan, self.slots)
        main_output = self.model_runner.execute_main_model(metadata)
        self.finish_previous()
        sampled = self.model_runner.execute_sample(main_output, metadata)
        current = StepState(metadata, sampled, started)
        self.steps += 1
        if metadata.is_prompt_step or not self.overlap:
            self.post_process(current)
        else:
            self.previous = current

    @property
    def previous_ready(self) -> bool:
        """True when ``finish_previous`` would not wait for the device."""
        return self.previous is None or self.previous.sampled.ready()

    def finish_previous(self) -> None:
        """Post-process the step that is held back, if one is. Also called when it is ready and no next plan is queued:
        a step never waits for a plan that may not come."""
        previous, self.previous = self.previous, None
        if previous is not None:
            self.post_process(previous)

    def post_process(self, state: StepState) -> None:
        """Tokens reach the host: histories advance, the result is sent."""
        sampled = state.sampled.output()
        self.send(make_result(state, sampled))
        rows = state.metadata.sample_rows
        assert rows is not None
        for i, sequence in rows.special:
            if sampled.ok[i]:
                sequence.record(int(sampled.tokens[i]))


def make_result(state: StepState, sampled: SamplerOutput) -> StepResult:
    """The message that answers a step's plan: rows without a fault, in the plan's order."""
    rows, key = state.metadata.sample_rows, state.metadata.key
    assert rows is not None
    assert key is not None
    slots, generations, tokens = rows.slots, rows.generations, sampled.tokens
    if sampled.faults:
        slots, generations, tokens = slots[sampled.ok], generations[sampled.ok], tokens[sampled.ok]
    return StepResult(
        epoch=key.epoch,
        seq=key.seq,
        digest=key.digest,
        slots=slots.astype(LE_INT32).tobytes(),
        generations=generations.astype(LE_UINT16).tobytes(),
        tokens=tokens.astype(LE_INT32).tobytes(),
        faults=sampled.faults,
        logprobs=sampled.logprobs,
        round_us=min(int((time.perf_counter() - state.started) * 1e6), 2**31 - 1),
    )
