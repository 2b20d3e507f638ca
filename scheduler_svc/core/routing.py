"""Which executor a waiting sequence goes to: where most of its prefix is cached and least runs.

Both count in blocks: ``cached prefix - load``, where load is the sequences that run there and the blocks of prompts in
its unanswered plans. So a long prefix goes where it is, and a short one that everybody uses does not gather everybody
on one executor.

Plans are made one executor at a time, and each pulls from its model's queue what is best placed with it. A sequence
is left for another executor only if that one could take it now and is sure to plan soon, and for ``placement_wait`` at
most, so nothing waits for an executor that hangs, or for one that has no tokens to spare. Nor is it left for little: a
sixteenth of the load, or, for an executor that has to answer a step first, a 32nd of its slots.

In a small fleet all others are asked; in a large one those which hold nothing or the least, and those which may hold
the prefix (prefix_homes.py); and for which of them a sequence was left is remembered for a moment.
"""

from __future__ import annotations

from heapq import nsmallest
from itertools import islice

import numpy as np

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.kv_peak import peak_blocks
from scheduler_svc.core.models import ASKED, ModelEntry
from scheduler_svc.core.prefix_cache import Prefix
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import PREFILL

_SOON = 0.5  # seconds since its last answer: a busy executor that will plan again soon
_MOST_OTHERS = ASKED - 1  # executors that a sequence is compared with
_LOADS_HOLD = 0.002  # seconds for which those with the least load are taken to be the same ...
_LOADS_SEEN = 128  # ... of so many
_LEFT_HOLDS = 0.01  # seconds for which nobody asks whether what was left for another still is
_MOST_LEFT = 32  # sequences that one plan leaves for others: what it costs has a bound


class Left:
    """What one plan has left for other executors."""

    __slots__ = ("count", "others", "taken", "tokens", "total")

    def __init__(self, others: list[ExecutorState]) -> None:
        self.others = others  # empty: nothing more is left
        self.taken = 0  # prompt tokens that the executor of this plan keeps for itself
        self.total = 0
        self.count: dict[bytes, int] = {}  # sequences, by session
        self.tokens: dict[bytes, int] = {}  # no more than they can take in a step or so

    def has_room(self, other: ExecutorState) -> bool:
        session = other.session
        return self.count.get(session, 0) < other.table.free and self.tokens.get(session, 0) < other.token_budget

    def add(self, other: ExecutorState, tokens: int) -> None:
        self.count[other.session] = self.count.get(other.session, 0) + 1
        self.tokens[other.session] = self.tokens.get(other.session, 0) + tokens
        self.total += 1
        if self.total >= _MOST_LEFT:
            self.others = []


class Routing:
    def __init__(self, config: CoreConfig, residency: Residency) -> None:
        self._depth = config.depth
        self._overcommit = config.kv_overcommit
        self._patience = config.placement_wait
        self._residency = residency

    def can_ever_take(self, executor: ExecutorState, sequence: Sequence) -> bool:
        """Fits its pool and context, and may continue outputs made elsewhere (equal numerics only)."""
        if sequence.limit > executor.max_sequence_tokens:
            return False
        return not sequence.outputs or sequence.numerics in ("", executor.numerics)

    def may_admit(self, executor: ExecutorState, sequence: Sequence) -> bool:
        """An executor that drains takes back only what nobody else can continue."""
        if not self.can_ever_take(executor, sequence):
            return False
        if executor.status is ExecutorStatus.READY:
            return True
        if executor.status is not ExecutorStatus.DRAINING or sequence.numerics != executor.numerics:
            return False
        return not any(self.can_ever_take(other, sequence) for other in executor.model.ready)

    def why_it_waits(self, sequence: Sequence) -> str:
        """For operators: what a waiting sequence waits for, as far as can be told now."""
        able = [e for e in sequence.stream.model.executors if self.may_admit(e, sequence)]
        if not able:
            return "an executor that can hold and continue it"
        if all(executor.table.free == 0 for executor in able):
            return "a slot"
        return sequence.waits_for

    def headroom(self, executor: ExecutorState) -> int:
        """Blocks to leave free at an admission: one for each running sequence, within reason."""
        return min(executor.table.used, executor.pool.total // 16 + 1)

    def plenty(self, executor: ExecutorState) -> int:
        """Blocks that admissions of one plan may take, each `most_blocks`, without asking whether there is room: there
        are headroom and more beyond them, and everybody's limits fit together."""
        pool, table, size = executor.pool, executor.table, executor.block_size
        spare = pool.available - (pool.total // 16 + 1)
        if self._overcommit == 0.0:
            return spare
        promised = (table.limit_total - table.used) // size + table.used
        return min(spare, int(self._overcommit * pool.total) - promised)

    def most_blocks(self, executor: ExecutorState, sequence: Sequence) -> int:
        """The most that one more sequence adds to what `plenty` compares."""
        return sequence.limit // executor.block_size + 2

    def peak_fits(self, executor: ExecutorState, sequence: Sequence) -> bool:
        """May this one join those that run there, by the most KV that they can come to need together (kv_peak.py)?"""
        if self.limits_fit(executor, sequence):
            return True
        table, size = executor.table, executor.block_size
        allowed = int(self._overcommit * executor.pool.total)
        last = sequence.limit - 1  # the last token needs no KV
        high = table.high
        occupied = table.live_generation[:high] >= 0
        limits = table.limit[:high][occupied].astype(np.int64) - 1
        # What the next row of each needs: one that prefills is then a token longer.
        tokens = table.planned_length[:high][occupied] + (table.phase[:high][occupied] == PREFILL)
        tokens = np.append(np.minimum(tokens, limits), min(sequence.known + 1, last))
        # Blocks are given back when the last token was answered, up to `depth` plans later.
        return peak_blocks(tokens + self._depth, np.append(limits, last) + self._depth, size) <= allowed

    def others(self, here: ExecutorState, now: float) -> list[ExecutorState]:
        """Ready ones of this model that will plan soon; of many, those with the least load."""
        model = here.model
        if not model.is_large:
            return [other for other in model.executors if other is not here and self._plans_soon(other, now)]
        found = [other for other in islice(model.idle.values(), ASKED) if other is not here]
        if len(found) < _MOST_OTHERS:
            found += [e for e in self._least_loaded(model, now) if e is not here and self._plans_soon(e, now)]
        return found[:_MOST_OTHERS]

    def _least_loaded(self, model: ModelEntry, now: float) -> list[ExecutorState]:
        if not 0.0 <= now - model.loads_at < _LOADS_HOLD:
            # The next ones in turn: of all, a look at each would be the longest part of a turn.
            some = model.executors[model.loads_from : model.loads_from + _LOADS_SEEN]
            some += model.executors[: max(0, min(model.loads_from, _LOADS_SEEN - len(some)))]
            model.loads_from = (model.loads_from + _LOADS_SEEN) % len(model.executors)
            soon = [other for other in some if self._plans_soon(other, now)]
            model.loads_at = now
            model.least_loaded = nsmallest(ASKED, soon, key=_load)
        return model.least_loaded

    def _plans_soon(self, executor: ExecutorState, now: float) -> bool:
        return (
            executor.status is ExecutorStatus.READY
            and executor.isolated is None
            and executor.table.used < executor.table.max_slots
            and (len(executor.inflight) < self._depth or now - executor.last_answer < _SOON)
        )

    def is_left(self, here: ExecutorState, sequence: Sequence, hits: Prefix, left: Left, now: float) -> bool:
        """Is this sequence left for one of the others, which can take it now and is better placed?"""
        if 0.0 < sequence.left_since <= now - self._patience:
            return False
        if sequence.left_since and self._stays_left(here, sequence, left, now):
            return sequence.left_for is not here
        uncached = sequence.known - hits.count * here.block_size
        best, best_score = None, self._score(here, sequence, hits, left.taken // here.block_size)
        best_score += _load(here) // 16
        for other in self._to_compare(here, sequence, left, now):
            if not left.has_room(other) or not self.can_ever_take(other, sequence):
                continue
            their_hits = self._residency.lookup(other, sequence)
            more = left.count.get(other.session, 0) + left.tokens.get(other.session, 0) // other.block_size
            if len(other.inflight) >= self._depth:
                more += other.table.max_slots // 32  # it would wait for a step of that one
            score = self._score(other, sequence, their_hits, more)
            if score > best_score and self._surely_has_room(other, sequence, their_hits):
                best, best_score = other, score
        if best is None:
            left.taken += uncached
            sequence.left_until = 0.0
            return False
        if sequence.left_since == 0.0:
            sequence.left_since = now
        sequence.left_for, sequence.left_until = best, now + _LEFT_HOLDS
        left.add(best, sequence.known)
        if best.session in best.model.idle:
            best.model.wanted[best.session] = best
        return True

    def _stays_left(self, here: ExecutorState, sequence: Sequence, left: Left, now: float) -> bool:
        """It was left for another a moment ago, which has it in its next plan; or for this one, whose turn it is."""
        other = sequence.left_for
        if other is here:
            sequence.left_until = 0.0
            return True
        if other is None or now >= sequence.left_until:
            return False
        if not other.inflight and other.session not in other.model.wanted:
            return False  # it had its turn, and did not take it
        if other.status is not ExecutorStatus.READY or not left.has_room(other):
            return False
        left.add(other, sequence.known)
        return True

    def _to_compare(self, here: ExecutorState, sequence: Sequence, left: Left, now: float) -> list[ExecutorState]:
        model = here.model
        if not (model.is_large and sequence.num_hashes):
            return left.others
        homes = [model.by_session.get(session) for session in model.homes.of(sequence.first_hash)]
        return left.others + [e for e in homes if e is not None and e is not here and self._plans_soon(e, now)]

    def _surely_has_room(self, executor: ExecutorState, sequence: Sequence, hits: Prefix) -> bool:
        headroom = self.headroom(executor)
        if not self._residency.has_blocks(executor, sequence, hits, headroom):
            return False
        return self.limits_fit(executor, sequence)

    def limits_fit(self, executor: ExecutorState, sequence: Sequence) -> bool:
        """Does it fit even if all of them reach their limits together? It costs nothing; `peak_fits` sorts them."""
        if self._overcommit == 0.0 or executor.table.used == 0:
            return True
        table, size = executor.table, executor.block_size
        most = (table.limit_total - table.used) // size + table.used + (sequence.limit - 1) // size + 1
        return most <= int(self._overcommit * executor.pool.total)

    def _score(self, executor: ExecutorState, sequence: Sequence, hits: Prefix, more: int) -> int:
        filling = self._residency.being_filled(executor, sequence, hits.count) is not None
        return hits.count + filling - _load(executor) - more


def _load(executor: ExecutorState) -> int:
    """Sequences that it runs, and blocks of prompts in its unanswered plans: what a newcomer would wait for."""
    prompt_tokens = sum([record.tokens - len(record.slots) for record in executor.inflight])
    return executor.table.used + prompt_tokens // executor.block_size
