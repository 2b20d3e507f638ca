"""Who was admitted lately, and so: what passed a request that waits, and by what rule.

One log a model, bounded; it costs an append an admission, and the question is answered when it is asked.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from scheduler_svc.core.sequence import Sequence

_REMEMBERED = 256


class Admitted(NamedTuple):
    at: float
    request_id: str
    tenant: str
    arrival: float
    priority: int
    deadline: float
    continued: bool
    order: int


class AdmissionLog:
    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[tuple[object, ...]] = deque(maxlen=_REMEMBERED)  # the fields of Admitted

    def add(self, sequence: Sequence, now: float) -> None:
        self.count += 1
        stream = sequence.stream
        self._recent.append(
            (
                now,
                stream.request_id,
                sequence.salt,
                sequence.arrival,
                sequence.priority,
                stream.deadline,
                sequence.continued,
                sequence.order,
            )
        )

    def passed(self, waiting: Sequence) -> list[tuple[Admitted, str]]:
        """Of the remembered admissions: those that came later than this one and went before it, with the rule."""
        return [
            (entry, _rule(waiting, entry))
            for entry in map(Admitted._make, self._recent)
            if entry.at >= waiting.enqueued and (entry.arrival, entry.order) > (waiting.arrival, waiting.order)
        ]


def _rule(waiting: Sequence, entry: Admitted) -> str:
    if entry.continued and not waiting.continued:
        return "continuations go first"
    if entry.priority < waiting.priority:
        return "a higher class"
    if entry.tenant != waiting.salt:
        return "its tenant was served less"
    if entry.deadline and (not waiting.stream.deadline or entry.deadline < waiting.stream.deadline):
        return "its deadline is nearer"
    return "this one could not be run then"
