"""How old may an unanswered step grow before its executor counts as hung?

::

    warm:  floor + slack x what a step of so many tokens took at worst, lately, on this executor
    cold:  a generous constant and more for each token

An executor is cold for its first steps, and while a sequence uses something of the sampling contract that no answered
step used here before: the first use of a kernel may compile it, and busy is not dead.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import cast

from protos.step import SamplingParams
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.pipeline import PlanRecord
from scheduler_svc.core.sequence import Sequence

WARM_STEPS = 8  # answered
_FADE = 0.98  # of the worst time, at every step of its size
_PROVEN_BY = 2  # outputs of a sequence, after which what it uses has surely run

_DEFAULTS = SamplingParams()
_NUMBERS = frozenset({"seed"})  # fields whose value never chooses another kernel
_FIELDS = tuple(field for field in SamplingParams.__struct_fields__ if field not in _NUMBERS)


_values = attrgetter(*_FIELDS)


@lru_cache(maxsize=1024)
def _features(values: tuple[object, ...]) -> frozenset[str]:
    """Of SamplingParams with these `_values`."""
    given = dict(zip(_FIELDS, values, strict=True))
    used = {field for field, value in given.items() if value != getattr(_DEFAULTS, field)}
    if "temperature" in used and cast(float, given["temperature"]) >= 1e-5:
        used.remove("temperature")  # 0 is another path, a different number is not
    return frozenset(used) or frozenset({""})


class StepAge:
    """Of one executor session."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._steps = 0
        self._worst: dict[int, float] = {}  # bit length of a step's tokens -> seconds
        self._proven: set[str] = set()
        self._seen: SamplingParams | None = None  # of the newest admission, with what it uses
        self._seen_features: frozenset[str] = frozenset()
        self._unproven: list[tuple[Sequence, int, frozenset[str]]] = []  # (sequence, its outputs when admitted, uses)

    def admitted(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        if sampling != self._seen:
            self._seen, self._seen_features = sampling, _features(_values(sampling))
        features = self._seen_features
        if not features <= self._proven:
            self._unproven.append((sequence, sequence.num_outputs, features))

    def answered(self, record: PlanRecord, seconds: float) -> None:
        """``seconds``: from the answer before it, or from its sending, whichever came later."""
        self._steps += 1
        size = record.tokens.bit_length()
        self._worst[size] = max(seconds, self._worst.get(size, 0.0) * _FADE)
        if self._unproven:
            self._prove()

    def epoch_over(self) -> None:
        """What was admitted goes on elsewhere, or is admitted again: what it does there proves nothing here."""
        self._unproven.clear()

    def allowed(self, record: PlanRecord) -> float:
        """Seconds."""
        config = self._config
        if self._steps < WARM_STEPS or self._unproven:
            return config.cold_step_timeout + config.step_timeout_per_token * record.tokens
        return config.step_timeout + config.step_slack * self._expected(record.tokens.bit_length())

    def _expected(self, size: int) -> float:
        """The worst of the nearest size that was measured, in proportion where that was a smaller one."""
        below = [known for known in self._worst if known <= size]
        if below:
            nearest = max(below)
            return self._worst[nearest] * 2.0 ** (size - nearest)
        return self._worst[min(self._worst)]

    def _prove(self) -> None:
        left = []
        for sequence, outputs, features in self._unproven:
            if sequence.num_outputs >= outputs + _PROVEN_BY:
                self._proven |= features
            elif sequence.executor is not None:  # else it ended, or goes on elsewhere: it proves nothing here
                left.append((sequence, outputs, features))
        self._unproven = [entry for entry in left if not entry[2] <= self._proven]
