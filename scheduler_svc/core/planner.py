"""One step plan for one executor, as a delta against what it already holds.

::

    ready decode rows -> credit -> budget -> blocks (preempting if none is left)
    prefill chunks of those admitted before, then admissions from the queue, within what is left of the budget
    delta + rows -> digest over the table -> StepPlan, and the record by which its result is matched

A steady step is a few vector operations over the rows; Python work is spent only on what changes.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from protos.digest import plan_digest
from protos.step import Admission, StepPlan
from protos.wire import LE_INT32, Int32, pack_int32
from scheduler_svc.core import policy
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.pipeline import PlanRecord, Rows, make_record
from scheduler_svc.core.prefix_cache import Prefix
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.routing import Left, Routing
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.slots import PREFILL
from scheduler_svc.core.suspects import Suspects
from scheduler_svc.core.workers import Workers

_NONE = np.empty(0, dtype=np.int32)
_NO_PAIRS = np.empty((0, 2), dtype=np.int32)
_NO_ROWS = np.empty(0, dtype=np.intp)
_MOST_LOOKED_AT = 128  # waiting for a prefix, in one plan: what it costs has a bound
_MOST_ADMITTED = 128  # in one plan: a turn is so long
_MOST_PEAKS = 8  # admissions of one plan for which the peak of KV is worked out (kv_peak.py)
_LOGPROB_VALUES = 2**18  # of prompt tokens that one plan may ask for: 2 MB of its result


class Draft:
    """A plan under construction."""

    __slots__ = (
        "admitted", "appended_blocks", "appended_slots", "budget", "credit", "decode", "logprob_values", "peaks_left",
        "plenty", "prefill", "sampled",
    )  # fmt: skip

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decode: Rows = _NO_ROWS
        self.appended_slots: Rows = _NO_ROWS
        self.appended_blocks: Int32 = _NONE
        self.admitted: dict[int, Sequence] = {}  # by slot
        self.prefill: list[tuple[int, int, int]] = []  # (slot, generation, count)
        self.sampled: list[int] = []  # prefill slots whose last known token runs: they sample
        self.logprob_values = _LOGPROB_VALUES
        self.peaks_left = _MOST_PEAKS
        self.plenty = 0  # blocks that admissions may take without another look (routing.py)
        self.credit: dict[int, policy.Room] = {}  # by worker index (absent: plenty)


class Planner:
    def __init__(
        self, config: CoreConfig, workers: Workers, residency: Residency, routing: Routing, suspects: Suspects
    ) -> None:
        self._config = config
        self._workers = workers
        self._residency = residency
        self._routing = routing
        self._suspects = suspects

    def plan(self, executor: ExecutorState, fleet: list[ExecutorState], now: float) -> StepPlan | None:
        """The next plan, already counted in the table and recorded as in flight; None when there is nothing to do."""
        nothing_here = not (executor.table.used or executor.released) and executor.isolated is None
        if nothing_here and not len(executor.model.queue):
            return None  # an idle executor costs a large fleet nothing
        budget = executor.token_budget
        if self._config.max_batch_tokens:
            budget = min(budget, self._config.max_batch_tokens)
        draft = Draft(budget)
        table = executor.table
        high = table.high
        rows = (table.planned_length[:high] < table.bound[:high]).nonzero()[0]
        alone = self._isolated(executor, fleet)
        if alone is not None:
            if any(_has_mates(record, alone) for record in executor.inflight):
                return self._finish(executor, draft, now)
            rows = rows[rows == alone.slot]
        rows, draft.credit = policy.within_credit(executor, rows, self._workers, fleet)

        could_admit = table.free > 0 and executor.pool.available > self._routing.headroom(executor)
        prefill_waits = bool(executor.prefilling) or (could_admit and len(executor.model.queue) > 0)
        rows = policy.within_budget(executor, rows, budget, prefill_waits)
        self._add_decode(executor, rows, draft, now)
        draft.budget = executor.pace.prompt_tokens(draft.budget, len(draft.decode))

        for sequence in list(executor.prefilling.values()):
            if draft.budget <= 0:
                break
            if alone is None or sequence is alone:
                self._add_prefill(executor, sequence, draft)
        if alone is None or alone.state is State.WAITING:
            self._admit(executor, alone, draft, now)
        return self._finish(executor, draft, now)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _add_decode(self, executor: ExecutorState, rows: Rows, draft: Draft, now: float) -> None:
        """Count the decode rows, and give a block to each that starts one."""
        table = executor.table
        rows, planned, lacking = self._with_blocks(executor, rows, now)
        draft.decode = rows
        draft.budget -= len(rows)
        if len(lacking):
            slots: list[int] = lacking.tolist()
            blocks: list[Any] = executor.pool.allocate(len(slots))  # Any: see blocks.py
            for i in range(len(slots)):
                table.blocks[slots[i]].append(blocks[i])
            draft.appended_slots, draft.appended_blocks = lacking, np.array(blocks, dtype=np.int32)
            table.num_blocks[lacking] += 1
            table.last_block[lacking] = draft.appended_blocks
            table.capacity[lacking] += executor.block_size
        table.planned_length[rows] = planned + 1

    def _with_blocks(self, executor: ExecutorState, rows: Rows, now: float) -> tuple[Rows, Int32, Rows]:
        """The rows that have, or can be given, a block for their next token; others are preempted for them. Returns
        (rows, their planned lengths, those of them that need a block)."""
        table = executor.table
        while True:
            planned = table.planned_length.take(rows)
            needs = planned > table.capacity.take(rows)
            lacking = rows[needs]
            if len(lacking) <= executor.pool.available:
                return rows, planned, lacking
            runnable = table.phase == PREFILL
            runnable[rows] = True
            others = [s for s in executor.residents() if s is not executor.isolated]
            victim = policy.victim(executor, others, runnable, forced=False)
            if victim is None and (len(lacking) < len(rows) or executor.inflight):
                # Something moves without those that get none: they wait for what it frees.
                served = lacking[: executor.pool.available]
                keep = ~needs | np.isin(rows, served)
                return rows[keep], planned[keep], served
            if victim is None and len(executor.residents()) > 1:
                # Nothing moves: all but the first in order give way, which fits alone (door.py).
                victim = policy.victim(executor, others, runnable, forced=True)
            if victim is None:
                return _NO_ROWS, _NONE, _NO_ROWS
            gone = victim.slot
            self._residency.preempt(executor, victim, now)
            rows = rows[rows != gone]

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _add_prefill(self, executor: ExecutorState, sequence: Sequence, draft: Draft) -> None:
        """The next chunk of an admitted sequence, if budget and (for the chunk that samples) credit allow."""
        table = executor.table
        slot = sequence.slot
        left = table.length.item(slot) - table.computed[slot]
        count = min(left, draft.budget)
        if self._config.max_prefill_chunk:
            count = min(count, self._config.max_prefill_chunk)
        credit = draft.credit.get(sequence.stream.worker.index)
        if sequence.owes_prompt_logprobs:
            values = sequence.sampling.prompt_logprobs + 4  # and the token's own, with what they are packed in
            count = min(count, draft.logprob_values // values)
            if count == 0 or (credit is not None and credit.left(sequence) <= 0):
                return
            draft.logprob_values -= count * values
        if count == left:
            if credit is not None:
                if credit.left(sequence) <= 0:
                    return
                credit.take()
            draft.sampled.append(slot)
            table.start_decoding(slot, self._config.text_run_ahead)
            del executor.prefilling[slot]
        table.computed[slot] += count
        draft.prefill.append((slot, sequence.generation, count))
        draft.budget -= count

    def _admit(self, executor: ExecutorState, alone: Sequence | None, draft: Draft, now: float) -> None:
        """Admissions in queue order, until budget, slots or blocks are spent."""
        if alone is None and not len(executor.model.queue):
            return
        table = executor.table
        full = table.free == 0 or executor.pool.available == 0
        if full and alone is None and not self._idle(executor, draft, self._may_run(executor, draft, now)):
            return  # the common case under load, for nothing
        left = Left(self._routing.others(executor, now) if alone is None else [])
        draft.plenty = self._routing.plenty(executor)
        ready, longest = executor.status is ExecutorStatus.READY, executor.max_sequence_tokens
        filling, queue, for_prefix = executor.filling, executor.model.queue, 0
        for sequence in [alone] if alone is not None else queue:
            if draft.budget <= 0 or len(draft.admitted) >= _MOST_ADMITTED:
                sequence.waits_for = "a step with tokens to spare"
                return
            fits = ready and sequence.limit <= longest and not sequence.outputs  # what most are asked
            if not (fits or self._routing.may_admit(executor, sequence)):
                sequence.waits_for = "an executor that can hold and continue it"
                continue
            if draft.credit:
                credit = draft.credit.get(sequence.stream.worker.index)
                if credit is not None and credit.left(sequence) <= 0:
                    sequence.waits_for = "credit of its API worker"
                    continue
            if sequence.stops_on_text and self._ran_ahead(sequence):
                sequence.waits_for = "its API worker's acknowledgement"
                continue
            if sequence.sampling.prompt_logprobs >= 0 and sequence.awaits_prompt_logprobs:
                sequence.waits_for = "the prompt logprobs that its first choice computes"
                continue
            if alone is None and sequence.deaths and self._suspects.must_run_alone(sequence):
                executor.isolated = sequence
                sequence.waits_for = "an executor to itself"
                if _moves(executor, draft):
                    return  # nothing more is planned until these are answered
                alone = sequence
            hits = self._residency.lookup(executor, sequence)
            if filling and alone is None and self._awaits_prefix(executor, sequence, hits.count, draft, now):
                for_prefix += 1
                if for_prefix == _MOST_LOOKED_AT:
                    return  # who computes what they wait for is at work here
                continue
            if left.others and alone is None and self._routing.is_left(executor, sequence, hits, left, now):
                sequence.waits_for = "its turn on a better placed executor"
                continue
            need = self._routing.most_blocks(executor, sequence)
            if need <= draft.plenty and table.used < table.max_slots:
                draft.plenty -= need
                slot = self._residency.admit(executor, sequence, hits)
            else:
                room = self._make_room(executor, sequence, hits, draft, now)
                if room is None:
                    return
                slot = self._residency.admit(executor, sequence, room)
                draft.plenty = self._routing.plenty(executor)
            if len(queue):
                executor.model.admissions.add(sequence, now)
            draft.admitted[slot] = sequence
            self._add_prefill(executor, sequence, draft)
            if alone is not None:
                return

    def _awaits_prefix(self, executor: ExecutorState, sequence: Sequence, hits: int, draft: Draft, now: float) -> bool:
        """Another sequence computes right now what this one misses: wait for that while anything moves here, but not
        for ever."""
        if self._residency.being_filled(executor, sequence, hits) is None or not _moves(executor, draft):
            return False
        if sequence.prefix_wait_until == 0.0:
            sequence.prefix_wait_until = now + self._config.prefix_wait
        if now >= sequence.prefix_wait_until:
            return False
        sequence.waits_for = "a prefix that another request computes"
        return True

    def _make_room(
        self, executor: ExecutorState, sequence: Sequence, hits: Prefix, draft: Draft, now: float
    ) -> Prefix | None:
        """What is found of its prefix, once there is a slot and room for it, with headroom; None if there is not.
        Residents that may not run anyway give way, others do not; a suspect that must run alone displaces whom it
        must."""
        table = executor.table
        alone = executor.isolated is sequence
        while True:
            headroom = 0 if alone else self._routing.headroom(executor)
            if table.free and self._residency.has_blocks(executor, sequence, hits, headroom):
                if alone or self._routing.limits_fit(executor, sequence):
                    return hits
                if draft.peaks_left == 0:
                    sequence.waits_for = "its turn"
                    return None  # so many were admitted that way already
                if self._routing.peak_fits(executor, sequence):
                    draft.peaks_left -= 1
                    return hits
                sequence.waits_for = "KV that those which run may come to need"
            else:
                sequence.waits_for = "blocks" if table.free else "a slot"
            runnable = self._may_run(executor, draft, now)
            if alone:
                spare = {slot for slot, _, _ in draft.prefill} | set(draft.decode.tolist())
                candidates = [s for s in executor.residents() if s.slot not in spare]
            else:
                candidates = self._idle(executor, draft, runnable)
            victim = policy.victim(executor, candidates, runnable, forced=alone)
            if victim is None and not (alone or _moves(executor, draft)):
                # Nothing moves here: who may not run gives way even without a token since its last preemption.
                victim = policy.victim(executor, candidates, runnable, forced=True)
            if victim is None:
                return None
            self._residency.preempt(executor, victim, now)
            hits = self._residency.lookup(executor, sequence)

    def _may_run(self, executor: ExecutorState, draft: Draft, now: float) -> npt.NDArray[np.bool_]:
        """[max_slots] which slots could have rows now, as far as their workers are concerned, or soon: those of a
        worker that is only behind will, so they keep their slots while anything moves here."""
        table = executor.table
        runnable = (table.planned_length < table.bound) | (table.phase == PREFILL)
        moves = _moves(executor, draft)
        for index, left in draft.credit.items():
            if left.again <= 0 and not (moves and left.first > 0 and not self._workers.stands_still(index, now)):
                runnable &= table.worker != index
        runnable[draft.decode] = True
        return runnable

    def _idle(self, executor: ExecutorState, draft: Draft, runnable: npt.NDArray[np.bool_]) -> list[Sequence]:
        """Residents that may not run anyway (no credit, no acknowledgement), with no token in flight."""
        table = executor.table
        occupied = table.live_generation >= 0
        idle = np.flatnonzero(occupied & ~runnable & (table.planned_length == table.length))
        taken = {slot for slot, _, _ in draft.prefill}
        found = (table.sequences[slot] for slot in idle.tolist() if slot not in taken)
        return [sequence for sequence in found if sequence is not None]

    def may_start(self, sequence: Sequence) -> bool:
        """Nothing but room on an executor and credit keeps this waiting sequence (for the check of progress)."""
        return not self._ran_ahead(sequence) and not sequence.awaits_prompt_logprobs

    def _ran_ahead(self, sequence: Sequence) -> bool:
        """It has run as far as its worker's acknowledgement allows."""
        return sequence.stops_on_text and sequence.num_outputs >= sequence.seen + self._config.text_run_ahead

    # -- isolation ---------------------------------------------------------------------------------------------------

    def _isolated(self, executor: ExecutorState, fleet: list[ExecutorState]) -> Sequence | None:
        """The suspect that has this executor to itself, while that lasts and it can run."""
        sequence = executor.isolated
        if sequence is None:
            return None
        waiting = sequence.state is State.WAITING and executor.status is ExecutorStatus.READY
        here = sequence.state is State.RUNNING and sequence.executor is executor
        worker = sequence.stream.worker
        # It awaits its worker (or answers that take its credit): others need not.
        room = worker.room if sequence.num_outputs else worker.room_for_first
        stuck = room <= policy.unanswered_of(worker.index, fleet) or self._ran_ahead(sequence)
        if not (waiting or here) or not self._suspects.must_run_alone(sequence) or (waiting and stuck):
            executor.isolated = None
            return None
        return None if stuck and not executor.inflight else sequence

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _finish(self, executor: ExecutorState, draft: Draft, now: float) -> StepPlan | None:
        has_rows = len(draft.decode) > 0 or bool(draft.prefill)
        if not has_rows and not (executor.released and not executor.inflight):
            return None  # releases ride with the next rows; alone they go only when nothing else would carry them
        table = executor.table
        released, prefill, sampling = _NONE, _NO_PAIRS, draft.decode
        if executor.released:
            released = np.array(executor.released, dtype=LE_INT32)
            executor.released.clear()
        decode = draft.decode.astype(LE_INT32)
        touched = [decode]
        if len(draft.appended_slots):
            touched.insert(0, draft.appended_slots.astype(LE_INT32))
        if draft.admitted:
            touched.insert(0, np.fromiter(draft.admitted, dtype=LE_INT32, count=len(draft.admitted)))
        if draft.prefill:
            pairs = [number for slot, _, count in draft.prefill for number in (slot, count)]
            prefill = np.array(pairs, dtype=LE_INT32).reshape(-1, 2)  # of pairs it would cost twice as much
            touched.append(prefill[:, 0])
        executor.seq += 1
        executor.digest = plan_digest(
            executor.digest,
            executor.seq,
            released,
            touched[0] if len(touched) == 1 else np.concatenate(touched),
            table.generation,
            table.num_blocks,
            table.last_block,
        )
        appended = b""
        if len(draft.appended_slots):
            places = np.empty((len(draft.appended_slots), 2), dtype=LE_INT32)
            places[:, 0] = draft.appended_slots
            places[:, 1] = draft.appended_blocks
            appended = places.tobytes()
        plan = StepPlan(
            epoch=executor.epoch,
            seq=executor.seq,
            digest=executor.digest,
            decode=decode.tobytes(),
            released=released.tobytes(),
            appended=appended,
            admitted=tuple(_admission(executor, slot, sequence) for slot, sequence in draft.admitted.items()),
            prefill=prefill.tobytes(),
        )
        if draft.sampled:
            sampling = np.concatenate([draft.decode, np.array(draft.sampled, dtype=np.intp)])
        executor.inflight.append(make_record(plan, sampling, table.generation, draft.prefill, now))
        return plan


def _moves(executor: ExecutorState, draft: Draft) -> bool:
    """Something runs here, in this plan or in one that is unanswered."""
    return bool(draft.prefill or len(draft.decode) or executor.inflight)


def _admission(executor: ExecutorState, slot: int, sequence: Sequence) -> Admission:
    return Admission(
        slot=slot,
        generation=sequence.generation,
        request_id=sequence.stream.request_id,
        choice=sequence.choice,
        prompt=sequence.prompt,
        outputs=bytes(sequence.outputs),
        computed=sequence.cache_count * executor.block_size,
        blocks=_packed(executor.table.blocks[slot]),
        sampling=sequence.sampling,
        prompt_scored=sequence.prompt_scored,
    )


def _packed(blocks: list[int]) -> bytes:
    """As pack_int32, which costs more for a few."""
    return struct.pack(f"<{len(blocks)}i", *blocks) if len(blocks) < 64 else pack_int32(blocks)


def _has_mates(record: PlanRecord, alone: Sequence) -> bool:
    """Does this unanswered plan run anything besides ``alone``?"""
    rows = list(zip(record.slots.tolist(), record.generations.tolist(), strict=True))
    rows += [(slot, generation) for slot, generation, _ in record.prefill]
    return any(row != (alone.slot, alone.generation) for row in rows)
