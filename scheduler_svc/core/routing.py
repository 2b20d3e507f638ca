"""Which executor a waiting sequence goes to: the longest cached prefix, then the least load.

Plans are made one executor at a time, and each pulls from its model's queue what is best placed with it. A sequence
is left for another executor only if that one could take it now and is sure to plan soon, and for ``placement_wait`` at
most, so nothing waits for an executor that hangs, or for one that has no tokens to spare.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.kv_peak import peak_blocks
from scheduler_svc.core.prefix_cache import Prefix
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import PREFILL

_SOON = 0.5  # seconds since its last answer: a busy executor that will plan again soon


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

    def has_room(self, executor: ExecutorState, sequence: Sequence, hits: Prefix) -> bool:
        if executor.table.free == 0:
            return False
        headroom = self.headroom(executor)
        return self._residency.has_blocks(executor, sequence, hits, headroom) and self.peak_fits(executor, sequence)

    def peak_fits(self, executor: ExecutorState, sequence: Sequence) -> bool:
        """May this one join those that run there, by the most KV that they can come to need together (kv_peak.py)?"""
        if self._overcommit == 0.0 or executor.table.used == 0:
            return True
        table, size = executor.table, executor.block_size
        allowed = int(self._overcommit * executor.pool.total)
        last = sequence.limit - 1  # the last token needs no KV
        if (table.limit_total - table.used) // size + table.used + last // size + 1 <= allowed:
            return True  # even if they all reached their limits together
        high = table.high
        occupied = table.live_generation[:high] >= 0
        limits = table.limit[:high][occupied].astype(np.int64) - 1
        # What the next row of each needs: one that prefills is then a token longer.
        tokens = table.planned_length[:high][occupied] + (table.phase[:high][occupied] == PREFILL)
        tokens = np.append(np.minimum(tokens, limits), min(sequence.known + 1, last))
        # Blocks are given back when the last token was answered, up to `depth` plans later.
        return peak_blocks(tokens + self._depth, np.append(limits, last) + self._depth, size) <= allowed

    def better_place(
        self,
        here: ExecutorState,
        others: list[ExecutorState],
        sequence: Sequence,
        hits: Prefix,
        left_to: Counter[bytes],
        now: float,
    ) -> ExecutorState | None:
        """One of the ``others`` (ready ones of this model) that can take this sequence now and is better placed.
        ``left_to`` counts, by session, what this plan has left for others already."""
        if 0.0 < sequence.left_since <= now - self._patience:
            return None
        best, best_score = None, self._score(here, sequence, hits, 0)
        for other in others:
            soon = len(other.inflight) < self._depth or now - other.last_answer < _SOON
            if not soon or other.isolated is not None or not self.can_ever_take(other, sequence):
                continue
            their_hits = self._residency.lookup(other, sequence)
            score = self._score(other, sequence, their_hits, left_to[other.session])
            if score > best_score and self.has_room(other, sequence, their_hits):
                best, best_score = other, score
        if best is not None and sequence.left_since == 0.0:
            sequence.left_since = now
        return best

    def _score(self, executor: ExecutorState, sequence: Sequence, hits: Prefix, more: int) -> tuple[int, int]:
        filling = self._residency.being_filled(executor, sequence, hits.count) is not None
        return hits.count + filling, -(executor.table.used + more)
