"""Which executor a waiting sequence goes to: the longest cached prefix, then the least load.

Plans are made one executor at a time, and each pulls from its model's queue what is best placed with it. A sequence
is left for another executor only if that one could take it now and is sure to plan soon, and for ``placement_wait`` at
most, so nothing waits for an executor that hangs, or for one that has no tokens to spare.
"""

from __future__ import annotations

from collections import Counter
from heapq import nsmallest

import numpy as np

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.kv_peak import peak_blocks
from scheduler_svc.core.prefix_cache import Prefix
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import PREFILL

_SOON = 0.5  # seconds since its last answer: a busy executor that will plan again soon
_MOST_OTHERS = 16  # executors that a sequence is compared with
_MOST_LEFT = 64  # sequences that one plan leaves for others: what it costs has a bound


class Left:
    """What one plan has left for other executors."""

    __slots__ = ("count", "others", "tokens")

    def __init__(self, others: list[ExecutorState]) -> None:
        self.others = others  # empty: nothing more is left
        self.count: Counter[bytes] = Counter()  # sequences, by session
        self.tokens: Counter[bytes] = Counter()  # no more than they can take in a step or so

    def add(self, other: ExecutorState, tokens: int) -> None:
        self.count[other.session] += 1
        self.tokens[other.session] += tokens
        if self.count.total() >= _MOST_LEFT:
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
        found = [
            other
            for other in here.model.executors
            if other is not here
            and other.status is ExecutorStatus.READY
            and other.isolated is None
            and other.table.used < other.table.max_slots
            and (len(other.inflight) < self._depth or now - other.last_answer < _SOON)
        ]
        return found if len(found) <= _MOST_OTHERS else nsmallest(_MOST_OTHERS, found, key=lambda e: e.table.used)

    def is_left(self, here: ExecutorState, sequence: Sequence, hits: Prefix, left: Left, now: float) -> bool:
        """Is this sequence left for one of the others, which can take it now and is better placed?"""
        if 0.0 < sequence.left_since <= now - self._patience:
            return False
        best, best_score = None, self._score(here, sequence, hits, 0)
        for other in left.others:
            count = left.count[other.session]
            if count >= other.table.free or left.tokens[other.session] >= other.token_budget:
                continue
            if not self.can_ever_take(other, sequence):
                continue
            their_hits = self._residency.lookup(other, sequence)
            score = self._score(other, sequence, their_hits, count)
            if score > best_score and self._surely_has_room(other, sequence, their_hits):
                best, best_score = other, score
        if best is None:
            return False
        if sequence.left_since == 0.0:
            sequence.left_since = now
        left.add(best, sequence.known)
        return True

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

    def _score(self, executor: ExecutorState, sequence: Sequence, hits: Prefix, more: int) -> tuple[int, int]:
        filling = self._residency.being_filled(executor, sequence, hits.count) is not None
        return hits.count + filling, -(executor.table.used + more)
