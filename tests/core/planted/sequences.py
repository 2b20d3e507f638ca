"""Bugs of slots, the pipeline, sequences and streams."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from protos.step import Admission
from scheduler_svc.core import commit, planner, policy
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.pipeline import PlanRecord, make_record
from scheduler_svc.core.planner import Draft, Planner
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.routing import Routing
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.slots import SlotTable
from scheduler_svc.core.streams import Streams
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.unanswered import Unanswered
from tests.core.planted.registry import Patch, bug

# -- slots and the pipeline ------------------------------------------------------------------------------------------


@bug("slot .* released, it is empty")
def a_slot_is_released_twice(patch: Patch) -> None:
    true = Residency._vacate

    def vacate(self: Residency, executor: ExecutorState, sequence: Sequence, last: bool = False) -> None:
        true(self, executor, sequence, last)
        executor.released.append(executor.released[-1])

    patch.setattr(Residency, "_vacate", vacate)


@bug("is free but not empty")
def a_freed_slot_keeps_its_bound(patch: Patch) -> None:
    true = SlotTable.drop

    def drop(self: SlotTable, slot: int) -> list[int]:
        bound = int(self.bound[slot])
        blocks = true(self, slot)
        self.bound[slot] = bound
        return blocks

    patch.setattr(SlotTable, "drop", drop)


@bug("slots used")
def used_slots_are_counted_wrong(patch: Patch) -> None:
    true = SlotTable.drop

    def drop(self: SlotTable, slot: int) -> list[int]:
        blocks = true(self, slot)
        self.used += 1
        return blocks

    patch.setattr(SlotTable, "drop", drop)


@bug("generation")
def a_slot_is_given_again_under_its_old_generation(patch: Patch) -> None:
    true = planner._admission

    def admission(executor: ExecutorState, slot: int, sequence: Sequence) -> Admission:
        told = true(executor, slot, sequence)
        return msgspec.structs.replace(told, generation=max(1, told.generation - 1))

    patch.setattr(planner, "_admission", admission)


@bug("nothing to compute")
def a_whole_prompt_may_be_found(patch: Patch) -> None:
    def most_hits(self: Residency, executor: ExecutorState, sequence: Sequence) -> int:
        return sequence.known // executor.block_size if self._cache_on and sequence.num_hashes else 0

    patch.setattr(Residency, "_most_hits", most_hits)


@bug("rows of|rows unanswered|a slot has two rows|committed")
def planned_tokens_are_not_counted(patch: Patch) -> None:
    true = Planner._add_decode

    def add_decode(self: Planner, executor: ExecutorState, rows: Any, draft: Draft, now: float) -> None:
        true(self, executor, rows, draft, now)
        executor.table.planned_length[draft.decode] -= 1

    patch.setattr(Planner, "_add_decode", add_decode)


@bug("tokens planned, .* rows unanswered|unanswered plans")
def a_plan_is_not_recorded(patch: Patch) -> None:
    def forget(*arguments: Any) -> PlanRecord:
        record = make_record(*arguments)
        record.slots = record.slots[:0]
        return record

    patch.setattr(planner, "make_record", forget)


@bug("unanswered plans")
def an_answered_plan_is_kept(patch: Patch) -> None:
    true = commit.Committer.commit

    def keep(self: commit.Committer, executor: ExecutorState, result: Any, now: float) -> None:
        record = executor.inflight[0] if executor.inflight else None
        true(self, executor, result, now)
        if record is not None and result.seq % 5 == 0:
            executor.inflight.append(record)

    patch.setattr(commit.Committer, "commit", keep)


@bug("digest mismatch")
def the_digest_leaves_something_out(patch: Patch) -> None:
    true = planner.plan_digest

    def digest(*arguments: Any) -> int:
        previous, seq, released, touched, *tables = arguments
        return true(previous, seq, released, touched[:-1], *tables)

    patch.setattr(planner, "plan_digest", digest)


@bug("limit")
def a_row_runs_past_its_limit(patch: Patch) -> None:
    true = SlotTable.set_bound

    def set_bound(self: SlotTable, slot: int, text_run_ahead: int) -> None:
        true(self, slot, text_run_ahead)
        if self.bound[slot]:
            self.bound[slot] += 1

    patch.setattr(SlotTable, "set_bound", set_bound)


@bug("tokens in one step")
def the_budget_is_ignored(patch: Patch) -> None:
    patch.setattr(Draft, "__init__", _with_budget(Draft.__init__))


def _with_budget(true: Any) -> Any:
    def init(self: Draft, budget: int) -> None:
        true(self, budget + 8)

    return init


@bug("prefilling .* differs from the phases")
def a_prefilling_sequence_is_forgotten(patch: Patch) -> None:
    true = Residency._vacate

    def vacate(self: Residency, executor: ExecutorState, sequence: Sequence, last: bool = False) -> None:
        slot, was = sequence.slot, sequence.slot in executor.prefilling
        true(self, executor, sequence, last)
        if was:
            executor.prefilling[slot] = sequence

    patch.setattr(Residency, "_vacate", vacate)


# -- sequences and streams -------------------------------------------------------------------------------------------


@bug("other tokens than alone|a row would read|shared block .* holds|rows of")
def a_continuation_forgets_an_output(patch: Patch) -> None:
    true = Residency.requeue

    def requeue(self: Residency, sequence: Sequence, now: float) -> None:
        del sequence.outputs[:4]
        sequence.known -= 1
        true(self, sequence, now)

    patch.setattr(Residency, "requeue", requeue)


@bug("a settling sequence waits|waiting for|nothing moves|places|rows are unanswered|still", depth=3)
def an_answer_of_a_preempted_row_is_dropped(patch: Patch) -> None:
    true = commit.Committer._apply_gone

    def apply_gone(self: commit.Committer, executor: ExecutorState, slots: Any, *more: Any) -> Any:
        nobody = np.full(len(slots), 10**6)
        return true(self, executor, nobody, *more)

    patch.setattr(commit.Committer, "_apply_gone", apply_gone)


@bug("sequences in queues and slots")
def a_waiting_sequence_is_lost(patch: Patch) -> None:
    true = WaitingQueue.push

    def push(self: WaitingQueue, sequence: Sequence, now: float) -> None:
        true(self, sequence, now)
        if sequence.order % 7 == 3:
            self.remove(sequence)

    patch.setattr(WaitingQueue, "push", push)


@bug("a sequence is in two places|sequences in queues and slots|not in this queue")
def an_admitted_sequence_stays_in_the_queue(patch: Patch) -> None:
    true = Residency.admit

    def admit(self: Residency, executor: ExecutorState, sequence: Sequence, hits: Any) -> int:
        slot = true(self, executor, sequence, hits)
        sequence.stream.model.queue.push(sequence, 0.0)
        sequence.state = State.RUNNING
        return slot

    patch.setattr(Residency, "admit", admit)


@bug("live, .* going on|is not its worker's|sequences in queues")
def an_ended_choice_counts_as_live(patch: Patch) -> None:
    true = Streams.finish

    def finish(self: Streams, sequence: Sequence, *more: Any) -> None:
        if len(sequence.stream.sequences) > 1:
            sequence.stream.live += 1
        true(self, sequence, *more)

    patch.setattr(Streams, "finish", finish)


@bug("ended twice|tokens after the end|cannot end twice|KeyError")
def an_end_is_told_twice(patch: Patch) -> None:
    true = Streams.finish

    def finish(self: Streams, sequence: Sequence, *more: Any) -> None:
        true(self, sequence, *more)
        last = self._outbox._items[-1]
        self._outbox._items.append(last)

    patch.setattr(Streams, "finish", finish)


@bug("beyond its credit|more tokens than the credit allows")
def credit_is_ignored(patch: Patch) -> None:
    patch.setattr(policy, "within_credit", lambda executor, rows, workers, executors: (rows, {}))


@bug("count as unanswered")
def rows_of_who_ended_count_for_ever(patch: Patch) -> None:
    patch.setattr(Unanswered, "ended", lambda self, executor: None)


@bug("no turn looks at it|nothing moves|could (run|start) there")
def an_answer_makes_no_room(patch: Patch) -> None:
    patch.setattr(Fleet, "_open", lambda self, executor: executor.model.idle.pop(executor.session, None))


@bug("tenants' streams")
def a_tenant_keeps_a_stream(patch: Patch) -> None:
    patch.setattr(Tenants, "closed", lambda self, stream: None)


@bug("queued tokens")
def queued_tokens_are_counted_wrong(patch: Patch) -> None:
    true = WaitingQueue.push

    def push(self: WaitingQueue, sequence: Sequence, now: float) -> None:
        true(self, sequence, now)
        self.tokens[sequence.salt] += 1

    patch.setattr(WaitingQueue, "push", push)


@bug("could start there")
def what_fits_is_not_admitted(patch: Patch) -> None:
    patch.setattr(Routing, "peak_fits", lambda self, executor, sequence: False)
    patch.setattr(Routing, "limits_fit", lambda self, executor, sequence: False)
    patch.setattr(Routing, "plenty", lambda self, executor: 0)


@bug("blocks asked for")
def there_seems_to_be_plenty_of_room(patch: Patch) -> None:
    true = Routing.plenty
    patch.setattr(Routing, "plenty", lambda self, executor: true(self, executor) + executor.pool.total)


@bug("could run there|could start there")
def prefill_is_starved(patch: Patch) -> None:
    true = Planner._add_prefill

    def add_prefill(self: Planner, executor: ExecutorState, sequence: Sequence, draft: Draft) -> None:
        if sequence.slot != 1:
            true(self, executor, sequence, draft)

    patch.setattr(Planner, "_add_prefill", add_prefill)


@bug("other tokens than alone|a row would read|shared block .* holds")
def a_token_is_filed_under_another_position(patch: Patch) -> None:
    true = SlotTable.flush

    def flush(self: SlotTable, slot: int) -> None:
        there = self.recent[:, slot] >= 0
        self.recent[there, slot] += 1
        true(self, slot)
        self.recent[there, slot] -= 1

    patch.setattr(SlotTable, "flush", flush)
