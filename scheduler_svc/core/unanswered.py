"""Sampling rows in flight, over all executors: the tokens that API workers will be sent whatever is planned next.

How many there are at all is kept as plans go out and answers come in. How many are one worker's is asked only while it
may be near its allowance (policy.py), and then only those executors are counted again where something changed since.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from scheduler_svc.core.pipeline import PlanRecord

if TYPE_CHECKING:
    from scheduler_svc.core.executor import ExecutorState


class Unanswered:
    def __init__(self) -> None:
        self.rows = 0  # of all workers, and with those whose sequence ended since
        self._total: Counter[int] = Counter()  # by worker index, as last counted
        self._counted: dict[ExecutorState, Counter[int]] = {}
        self._changed: dict[ExecutorState, None] = {}

    def planned(self, executor: ExecutorState, record: PlanRecord) -> None:
        self.rows += record.num_sampling
        self._changed[executor] = None

    def answered(self, executor: ExecutorState, record: PlanRecord) -> None:
        self.rows -= record.num_sampling
        self._changed[executor] = None

    def ended(self, executor: ExecutorState) -> None:
        """A sequence there, which may have rows in flight, will take no more tokens."""
        self._changed[executor] = None

    def given_up(self, executor: ExecutorState) -> None:
        """None of its plans will be answered any more. To be called while they still count as in flight."""
        self.rows -= executor.inflight_rows
        self._changed.pop(executor, None)
        self._total.subtract(self._counted.pop(executor, Counter()))

    def of(self, worker: int) -> int:
        """Tokens that will go to the worker of this index."""
        for executor in self._changed:
            self._total.subtract(self._counted.pop(executor, Counter()))
            counted = rows_by_worker(executor)
            if counted:
                self._counted[executor] = counted
                self._total.update(counted)
        self._changed.clear()
        return self._total[worker]


def rows_by_worker(executor: ExecutorState) -> Counter[int]:
    """Its sampling rows in flight whose tokens will be delivered, by the worker's index."""
    table = executor.table
    rows: Counter[int] = Counter()
    for record in executor.inflight:
        live = table.live_generation[record.slots] == record.generations
        counts = np.bincount(table.worker[record.slots[live]])
        for index in counts.nonzero()[0].tolist():
            rows[index] += int(counts[index])
    for sequence in executor.settling.values():
        rows[sequence.stream.worker.index] += sequence.pending_rows
    return rows
