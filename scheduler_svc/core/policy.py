"""Who is run, who must give way: the decisions of a step that are not bookkeeping.

* Decode rows first, then prefill chunks, within the step's token budget. When prefill waits and decode would take the
  whole budget, an eighth of it is kept for prefill; decode rows that do not fit take turns (`rotate`).
* A victim is the one that matters least: rows that may not run anyway (no credit, awaiting acknowledgement) first,
  then the lowest class, then the cheapest to compute again, which costs more each time it was preempted; then the
  latest arrival. It must truly free blocks, and must have made progress since its last preemption: every preemption
  follows a token, so there are no more of them than tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.pipeline import Rows
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.unanswered import rows_by_worker
from scheduler_svc.core.workers import Workers, WorkerState


def within_budget(executor: ExecutorState, rows: Rows, budget: int, prefill_waits: bool) -> Rows:
    """Of the decode rows that are ready (slots, ascending), those for this step."""
    room = budget - max(1, budget // 8) if prefill_waits and budget > 1 else budget
    if len(rows) <= room:
        return rows
    return rotate(executor, rows, room)


def rotate(executor: ExecutorState, rows: Rows, room: int) -> Rows:
    """``room`` of the rows, starting where the last step that could not take all of them stopped."""
    start = int(np.searchsorted(rows, executor.rotor))
    picked = np.concatenate([rows[start:], rows[:start]])[:room]
    if len(picked):
        executor.rotor = int(picked[-1]) + 1
    return np.sort(picked)


@dataclass(slots=True)
class Room:
    """Tokens that a worker near its allowance may be sent beyond the rows that decode."""

    first: int  # of choices that have had none
    again: int  # of others

    def left(self, sequence: Sequence) -> int:
        return self.again if sequence.num_outputs else self.first

    def take(self) -> None:
        self.first -= 1
        self.again -= 1


def within_credit(
    executor: ExecutorState, rows: Rows, workers: Workers, executors: list[ExecutorState]
) -> tuple[Rows, dict[int, Room]]:
    """Decode rows whose worker has credit for one more token each, and what is left for prefill rows.

    The second value is by the worker's index; a worker that is not in it has plenty. Only workers near their allowance
    cost anything here.
    """
    left: dict[int, Room] = {}
    unanswered = workers.unanswered
    # No plan samples more rows than there are slots. All rows in flight first: that asks nobody whose they are.
    again, first = unanswered.rows + len(rows), unanswered.rows + executor.table.max_slots
    tight = [w for w in workers.by_peer.values() if w.room <= again or w.room_for_first <= first]
    if tight:
        tight = [w for w in tight if _is_tight(w, unanswered.of(w.index), len(rows), executor.table.max_slots)]
    if not tight:
        return rows, left
    columns = executor.table.worker[rows]
    keep = np.ones(len(rows), dtype=bool)
    for worker in tight:
        coming = unanswered.of(worker.index)
        room = max(0, worker.room - coming)
        mine = np.flatnonzero(columns == worker.index)
        if len(mine) > room:
            # Take turns, or the low slots would eat all the credit.
            allowed = rotate(executor, rows[mine], room)
            keep[mine] = np.isin(rows[mine], allowed)
        taken = coming + min(len(mine), room)
        left[worker.index] = Room(max(0, worker.room_for_first - taken), max(0, worker.room - taken))
    return rows[keep], left


def _is_tight(worker: WorkerState, unanswered: int, rows: int, max_slots: int) -> bool:
    return worker.room <= unanswered + rows or worker.room_for_first <= unanswered + max_slots


def unanswered_of(index: int, executors: list[ExecutorState]) -> int:
    """Sampling rows in flight whose tokens will go to this worker, counted anew (`Unanswered` keeps count)."""
    return sum([rows_by_worker(executor)[index] for executor in executors])


def victim(
    executor: ExecutorState, candidates: Iterable[Sequence], runnable: npt.NDArray[np.bool_], forced: bool
) -> Sequence | None:
    """The candidate that matters least of those whose preemption frees blocks; ``runnable`` marks the slots that could
    have a row in this plan. ``forced``: nothing else helps, so lack of progress is no excuse; then the latest arrival
    goes, whatever it costs, so that the first one comes to its end."""
    table, cost = executor.table, 0 if forced else 1
    ranked = sorted(
        (s for s in candidates if forced or s.num_outputs > s.mark_at_preemption),
        key=lambda s: (
            not runnable[s.slot],
            s.priority,
            -cost * table.length.item(s.slot) * (1 + s.preemptions),
            s.arrival,
            s.order,
        ),
        reverse=True,
    )
    return next((s for s in ranked if executor.pool.yields(table.blocks[s.slot])), None)
