"""How old a step may grow: by what was measured, and generous where a kernel may be compiling."""

from __future__ import annotations

from typing import cast

import numpy as np

from protos.step import SamplingParams
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.pipeline import PlanRecord
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step_age import WARM_STEPS, StepAge

CONFIG = CoreConfig()
NONE = np.empty(0, dtype=np.intp)


def step(tokens: int) -> PlanRecord:
    return PlanRecord(1, 0, NONE, NONE.astype(np.int32), b"", b"", [], tokens, 0.0)


class Row:
    def __init__(self, **sampling: object) -> None:
        self.sampling = SamplingParams(**sampling)  # type: ignore[arg-type]
        self.num_outputs = 0
        self.executor: object | None = self


def admit(age: StepAge, row: Row) -> None:
    age.admitted(cast(Sequence, row))


def warm(age: StepAge, seconds: float = 0.05, tokens: int = 8) -> None:
    row = Row()
    admit(age, row)
    for _ in range(WARM_STEPS):
        row.num_outputs += 1
        age.answered(step(tokens), seconds)


def test_cold_steps_may_compile() -> None:
    age = StepAge(CONFIG)
    assert age.allowed(step(8)) > 30.0
    warm(age)
    assert age.allowed(step(8)) < 5.0


def test_a_long_prefill_has_its_time() -> None:
    """2,048 tokens of a model that needs 50 ms for 8: 12.8 s would be no surprise."""
    age = StepAge(CONFIG)
    warm(age)
    assert age.allowed(step(2048)) > 4 * 12.8
    age.answered(step(2048), 0.5)
    assert age.allowed(step(2048)) < 7.0, "measured since"
    assert age.allowed(step(8)) < 5.0, "and the small ones are what they were"


def test_slow_steps_stretch_it_and_fade() -> None:
    age = StepAge(CONFIG)
    warm(age)
    age.answered(step(8), 3.0)
    assert age.allowed(step(8)) > 15.0
    for _ in range(300):
        age.answered(step(8), 0.05)
    assert age.allowed(step(8)) < 5.0


def test_what_never_ran_here_may_compile() -> None:
    age = StepAge(CONFIG)
    warm(age)
    row = Row(temperature=0.0)
    admit(age, row)
    assert age.allowed(step(8)) > 30.0
    row.num_outputs = 2
    age.answered(step(8), 0.05)
    assert age.allowed(step(8)) < 5.0
    admit(age, Row(temperature=0.0, seed=5))
    assert age.allowed(step(8)) < 5.0, "it ran before; a seed is no other kernel"


def test_a_sequence_that_left_keeps_nothing_cold() -> None:
    age = StepAge(CONFIG)
    warm(age)
    row = Row(top_k=5)
    admit(age, row)
    row.executor = None
    age.answered(step(8), 0.05)
    assert age.allowed(step(8)) < 5.0


def test_tokens_made_elsewhere_after_a_lost_epoch_prove_nothing_here() -> None:
    age = StepAge(CONFIG)
    warm(age)
    row = Row(top_k=5)
    admit(age, row)
    age.epoch_over()
    row.num_outputs = 20  # on another executor
    age.answered(step(8), 0.05)
    admit(age, Row(top_k=5))
    assert age.allowed(step(8)) > 30.0
