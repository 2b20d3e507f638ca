"""Is everything where it must be, exactly once? Run after every event in tests, and on demand in production."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.policy import Room, unanswered_of
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.slots import DECODE, FREE, PREFILL

if TYPE_CHECKING:
    from scheduler_svc.core.core import Core


def check_all(core: Core) -> list[str]:
    """Every broken invariant, in words; empty when all hold."""
    problems: list[str] = []
    for executor in core.fleet.sessions.values():
        prefix = f"executor {executor.name}: "
        problems += [prefix + problem for problem in [*_blocks(executor), *_slots(executor), *_pipeline(executor)]]
    problems += _sequences(core)
    problems += _turns(core)
    return problems


def check_progress(core: Core) -> list[str]:
    """Whenever nothing runs and something can, the next plan is not empty. To be asked after `Core.advance`."""
    problems = []
    fleet = list(core.fleet.sessions.values())
    room = {}
    for w in core.workers.by_peer.values():
        unanswered = unanswered_of(w.index, fleet)
        room[w.index] = Room(first=w.room_for_first - unanswered, again=w.room - unanswered)
    for entry in core.fleet.models.values():
        if any(executor.inflight for executor in entry.executors):
            continue
        for executor in entry.executors:
            if executor.status not in (ExecutorStatus.READY, ExecutorStatus.DRAINING):
                continue
            table = executor.table
            for sequence in executor.residents():
                ready = table.phase[sequence.slot] == PREFILL
                ready |= table.planned_length[sequence.slot] < table.bound[sequence.slot]
                if ready and room[sequence.stream.worker.index].left(sequence) > 0:
                    problems.append(f"executor {executor.name} is idle, {sequence.stream.request_id} could run there")
            for sequence in entry.queue:
                if room[sequence.stream.worker.index].left(sequence) <= 0 or not core.planner.may_start(sequence):
                    continue
                if core.routing.may_admit(executor, sequence):
                    problems.append(f"executor {executor.name} is idle, {sequence.stream.request_id} could start there")
                    break
    return problems


def _blocks(executor: ExecutorState) -> list[str]:
    pool, table, cache = executor.pool, executor.table, executor.cache
    problems = []
    if pool.free + pool.cached + pool.owned != pool.total:
        problems.append(f"free {pool.free} + cached {pool.cached} + owned {pool.owned} != total {pool.total}")
    lists = [table.blocks[sequence.slot] for sequence in executor.residents()]
    held = np.bincount(np.array([block for blocks in lists for block in blocks], dtype=np.int64), minlength=pool.total)
    if (held != pool.refs).any():
        wrong = np.flatnonzero(held != pool.refs)[:5].tolist()
        problems.append(f"reference counts of blocks {wrong} differ from the slots' blocks")
    owned, cached, free = held > 0, np.zeros(pool.total, dtype=bool), np.zeros(pool.total, dtype=bool)
    lru = list(pool.lru())
    cached[lru] = True
    ids = pool.free_ids()
    free[ids] = True
    if np.count_nonzero(owned) != pool.owned:
        problems.append(f"owned is {pool.owned}, {np.count_nonzero(owned)} blocks have references")
    if np.count_nonzero(free) != len(ids):
        problems.append("a block is free twice")
    if (owned & cached).any() or (owned & free).any() or (cached & free).any():
        problems.append("a block is in two states")
    if len(lru) != pool.cached or len(set(lru)) != len(lru):
        problems.append(f"cached is {pool.cached}, {len(lru)} blocks are in line for eviction")
    if not pool.findable[lru].all():
        problems.append("a cached block cannot be found")
    runs = list(cache.by_hash.values())
    if any(pool.found_in[block] is not run for run in runs for block in run.blocks):
        problems.append("the two indices of the prefix cache differ")
    if not sum(len(run.blocks) for run in runs) == cache.blocks == np.count_nonzero(pool.findable):
        problems.append("a block that can be found is in no run of the prefix cache")
    return problems


def _slots(executor: ExecutorState) -> list[str]:
    table = executor.table
    problems = []
    residents = executor.residents()
    if table.used != len(residents):
        problems.append(f"{table.used} slots used, {len(residents)} residents")
    for slot in range(table.high):
        if table.sequences[slot] is None:
            empty = table.num_blocks[slot] == 0 and table.last_block[slot] == -1 and not table.blocks[slot]
            idle = table.phase[slot] == FREE and table.bound[slot] == 0 and table.live_generation[slot] == -1
            if not (empty and idle):
                problems.append(f"slot {slot} is free but not empty")
    for sequence in residents:
        problems += _slot(executor, sequence)
    prefilling = {s for s in range(table.high) if table.phase[s] == PREFILL}
    if set(executor.prefilling) != prefilling:
        problems.append(f"prefilling {set(executor.prefilling)} differs from the phases {prefilling}")
    return problems


def _slot(executor: ExecutorState, sequence: Sequence) -> list[str]:
    table, slot = executor.table, sequence.slot
    problems = []
    blocks = table.blocks[slot]
    length, planned = int(table.length[slot]), int(table.planned_length[slot])
    computed = planned - 1 if table.phase[slot] == DECODE else int(table.computed[slot])
    if table.num_blocks[slot] != len(blocks) or table.last_block[slot] != blocks[-1]:
        problems.append(f"slot {slot}: the mirror's blocks differ from the list")
    if table.capacity[slot] != len(blocks) * executor.block_size:
        problems.append(f"slot {slot}: capacity {table.capacity[slot]} with {len(blocks)} blocks")
    if table.live_generation[slot] != sequence.generation or table.generation[slot] != sequence.generation:
        problems.append(f"slot {slot}: its generation differs from its sequence's")
    if not length <= planned <= sequence.limit:
        problems.append(f"slot {slot}: length {length}, planned {planned}, limit {sequence.limit}")
    if not executor.table.committed_kv(slot) <= computed <= int(table.capacity[slot]):
        problems.append(f"slot {slot}: committed {table.committed_kv(slot)}, computed {computed}")
    unanswered = sum(
        int(np.count_nonzero((record.slots == slot) & (record.generations == sequence.generation)))
        for record in executor.inflight
    )
    if planned - length != unanswered:
        problems.append(f"slot {slot}: {planned - length} tokens planned, {unanswered} rows unanswered")
    if sequence.cache_count * executor.block_size > max(table.committed_kv(slot), 0):
        problems.append(f"slot {slot}: a block is findable before it was filled")
    return problems


def _pipeline(executor: ExecutorState) -> list[str]:
    problems = []
    seqs = [record.seq for record in executor.inflight]
    if seqs != list(range(executor.seq - len(seqs) + 1, executor.seq + 1)):
        problems.append(f"unanswered plans {seqs}, the newest is {executor.seq}")
    for (slot, generation), sequence in executor.settling.items():
        rows = sum(
            int(np.count_nonzero((record.slots == slot) & (record.generations == generation)))
            for record in executor.inflight
        )
        if rows != sequence.pending_rows or rows == 0:
            problems.append(f"a settling sequence waits for {sequence.pending_rows} rows, {rows} are unanswered")
    return problems


def _turns(core: Core) -> list[str]:
    """Those that a turn does not look at have nothing to be planned, and the rows in flight are counted right."""
    problems = []
    fleet = list(core.fleet.sessions.values())
    for executor in fleet:
        idle, full = executor.session in executor.model.idle, len(executor.inflight) >= core.config.depth
        if idle and (executor.table.used or executor.released or executor.inflight or executor.settling):
            problems.append(f"executor {executor.name} counts as idle and is not")
        looked_at = idle or executor.session in core.fleet.open
        if not (looked_at or full) and executor.status in (ExecutorStatus.READY, ExecutorStatus.DRAINING):
            problems.append(f"executor {executor.name} has room for a plan, no turn looks at it")
    unanswered = core.workers.unanswered
    if unanswered.rows != sum(executor.inflight_rows for executor in fleet):
        problems.append(f"{unanswered.rows} rows count as unanswered")
    for worker in core.workers.by_peer.values():
        if unanswered.of(worker.index) != unanswered_of(worker.index, fleet):
            problems.append(f"{unanswered.of(worker.index)} rows of worker {worker.name} count as unanswered")
    return problems


def _sequences(core: Core) -> list[str]:
    problems = []
    places: Counter[int] = Counter()
    for entry in core.fleet.models.values():
        places.update(id(sequence) for sequence in entry.queue.unordered())
    for executor in core.fleet.sessions.values():
        places.update(id(sequence) for sequence in executor.residents())
        places.update(id(sequence) for sequence in executor.settling.values())
    live: set[int] = set()
    for stream in core.streams.by_request.values():
        ongoing = [s for s in stream.sequences.values() if s.state is not State.ENDED]
        live.update(id(s) for s in ongoing)
        if len(ongoing) != stream.live or not ongoing:
            problems.append(f"stream {stream.request_id}: {stream.live} live, {len(ongoing)} going on")
        if stream.worker.streams.get(stream.number) is not stream:
            problems.append(f"stream {stream.request_id} is not its worker's")
    if set(places) != live:
        problems.append(f"{len(live)} live sequences, {len(places)} sequences in queues and slots")
    if any(count != 1 for count in places.values()):
        problems.append("a sequence is in two places")
    if core.tenants.live() != set(core.streams.by_request.values()):
        problems.append("the tenants' streams are not the live streams")
    for entry in core.fleet.models.values():
        queued: Counter[str] = Counter()
        for sequence in entry.queue.unordered():
            queued[sequence.salt] += sequence.known
        if queued != entry.queue.tokens:
            problems.append(f"model {entry.name}: the tenants' queued tokens differ from the queue's")
    for worker in core.workers.by_peer.values():
        if worker.sent - worker.credited > worker.window:
            problems.append(f"worker {worker.name} was sent {worker.sent - worker.credited} tokens beyond its credit")
    return problems
