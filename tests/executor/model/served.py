"""A real model behind the scheduler core, in one process and without sockets: what `tests.core.world` can drive."""

from __future__ import annotations

from collections import deque
from typing import Any

from executor_svc.model_runner import ModelRunner
from executor_svc.slots import SlotLimits, Slots
from executor_svc.worker import Worker
from protos import step
from protos.wire import Epoch
from tests.core.sim import SimExecutor


class ModelExecutor(SimExecutor):
    """Runs plans with the executor's own worker. ``model`` has its cache: ``limits.num_blocks`` of
    ``limits.block_size``."""

    def __init__(self, model: Any, limits: step.Limits, name: str = "real") -> None:
        facts = model.facts
        card = step.ModelCard(
            "m", facts.architecture, facts.fingerprint, facts.numerics, facts.vocab_size, facts.context_length,
            facts.eos_token_ids, (),
        )  # fmt: skip
        super().__init__(name, 1, card, limits)
        self.sent: deque[step.StepResult | step.EpochLost] = deque()
        slots = Slots(
            SlotLimits(
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                max_slots=limits.max_slots,
                max_batch_tokens=limits.max_batch_tokens,
                vocab_size=facts.vocab_size,
                context_length=facts.context_length,
            )
        )
        self.worker = Worker(slots, ModelRunner(model, limits.max_slots), self.sent.append)

    def _clear(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.answered = 0
        self.queue.clear()
        self.worker.begin_epoch(epoch)

    def run(self) -> step.ToCore | None:
        if not self.queue:
            return None
        plan = self.queue.popleft().plan
        self.plans.append(plan)
        self.worker.execute_plan(plan)
        answer = self.sent.popleft() if self.sent else None
        assert not isinstance(answer, step.EpochLost), answer
        return answer
