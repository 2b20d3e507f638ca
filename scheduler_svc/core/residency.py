"""How a sequence enters and leaves an executor: the only code that gives or takes slots and blocks.

::

    WAITING --admit--> RUNNING --preempt--> SETTLING --last row answered--> WAITING
                          |        `------- nothing unanswered -------------^
                          `--detach (finished, cancelled, failed)--> out

There is one way out of a slot (`_vacate`), so nothing can be released twice. Slots and blocks given up are free at
once: the plan that gives them out again runs after every plan that used them.
"""

from __future__ import annotations

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.prefix_cache import NOTHING, Prefix
from scheduler_svc.core.prefix_run import is_there
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.unanswered import Unanswered

_MOST_FOUND = 64  # caches of which a waiting sequence keeps what it found; among them some that are gone
_NEVER_LOOKED = (NOTHING, -1)


class Residency:
    def __init__(self, config: CoreConfig, unanswered: Unanswered) -> None:
        self._unanswered = unanswered
        self._cache_on = config.prefix_cache
        self.preemptions = 0
        self.prefix_hits = 0  # blocks found at admissions, over all executors

    # -- in ----------------------------------------------------------------------------------------------------------

    def lookup(self, executor: ExecutorState, sequence: Sequence) -> Prefix:
        """The findable prefix of this sequence there. What an earlier look found is not looked up again."""
        cache = executor.cache
        if not (sequence.found or sequence.first_hash in cache.by_hash):
            return NOTHING
        hashes = sequence.hashes
        most = min(self._most_hits(executor, sequence), len(hashes))
        if most <= 0:
            return NOTHING
        found, dropped = sequence.found.get(cache, _NEVER_LOOKED)
        if dropped != cache.dropped:
            found = found.still_there()
        if found.count < most and cache.needs_all(found.end, hashes[found.count]):
            found = cache.extend(found, hashes, sequence.tokens(), sequence.salt, most)
        if len(sequence.found) >= _MOST_FOUND and cache not in sequence.found:
            sequence.found.clear()
        sequence.found[cache] = found, cache.dropped
        return found.first(most)

    def being_filled(self, executor: ExecutorState, sequence: Sequence, hits: int) -> Sequence | None:
        """The sequence that computes right now the first block that this one misses."""
        other = executor.filling.get(sequence.hash_at(hits)) if hits < sequence.num_hashes else None
        return other if other is not None and hits < self._most_hits(executor, sequence) else None

    def has_blocks(self, executor: ExecutorState, sequence: Sequence, hits: Prefix, headroom: int) -> bool:
        """Are there as many available blocks as an admission takes (new ones, and hits that are evictable now), and
        ``headroom`` more?"""
        pool = executor.pool
        total = -(-sequence.known // executor.block_size)
        room = pool.available - headroom
        if total <= room:
            return True  # even if all hits are evictable
        return total - hits.count <= room and total - hits.count + pool.idle(hits.blocks) <= room

    def admit(self, executor: ExecutorState, sequence: Sequence, hits: Prefix) -> int:
        """Give a waiting sequence a slot and the blocks for all its known tokens. Returns the slot."""
        sequence.stream.model.queue.remove(sequence)
        known, size, cache = sequence.known, executor.block_size, executor.cache
        total = -(-known // size)
        found = hits.count
        if found:
            executor.pool.share(hits.blocks)
            blocks = hits.blocks + executor.pool.allocate(total - found)
        else:
            blocks = executor.pool.allocate(total)
        computed = found * size
        slot = executor.table.take(sequence, blocks, computed, size)
        sequence.state = State.RUNNING
        sequence.executor = executor
        sequence.cache_count = found
        sequence.cache_tip = hits.end
        sequence.found.clear()
        sequence.left_for = None
        sequence.waits_for = ""
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(computed, sequence.prompt_len)
        if not sequence.continued:
            executor.model.queue.shares.charge(sequence.salt, known - computed)
        self.prefix_hits += found
        cache.hits += found
        cache.lookups += total
        executor.prefilling[slot] = sequence
        executor.step_age.admitted(sequence)
        if self._cache_on and sequence.num_hashes:
            self._announce(executor, sequence, found)
            if executor.model.is_large:
                executor.model.homes.add(sequence.first_hash, executor.session)
        return slot

    # -- while there -------------------------------------------------------------------------------------------------

    def register(self, executor: ExecutorState, sequence: Sequence, last: bool = False) -> None:
        """Make every full block that answered plans have filled findable (its tokens must be out of the tail).
        ``last``: the sequence ends, nobody will ask for its own hashes any more."""
        if not (self._cache_on and sequence.num_hashes):
            return
        size = executor.block_size
        start, full = sequence.cache_count, executor.table.committed_kv(sequence.slot) // size
        if start >= full:
            return
        tip = sequence.cache_tip
        if tip is not None and not is_there(tip):
            return  # the chain was cut by an eviction: what follows could not be found
        cache, own = executor.cache, executor.table.blocks[sequence.slot]
        held = own[start - 1]
        content = sequence.tokens_between(start * size, full * size)
        if last and tip is not None and cache.grows(tip, held):
            hashes = []
        else:
            known = sequence.num_hashes  # at least one: a prompt shorter than a block has none, and does not come here
            if known < full:
                beyond = content[4 * size * (known - start) :]
                if last and start == known:
                    sequence.add_hashes(beyond[: 4 * size], size)
                    beyond = beyond[4 * size :] if cache.needs_all(tip, sequence.hashes[start]) else b""
                if beyond:
                    sequence.add_hashes(beyond, size)
            if start == 0 and not cache.needs_all(None, sequence.first_hash):
                hashes = [sequence.first_hash]
            else:
                hashes = sequence.hashes[start:full]
        sequence.cache_tip = cache.register(hashes, tip, sequence.salt, content, own[start:full], held)
        sequence.cache_count = full
        if sequence.fills:
            self._announce(executor, sequence, full)

    # -- out ---------------------------------------------------------------------------------------------------------

    def preempt(self, executor: ExecutorState, sequence: Sequence, now: float) -> None:
        """Out of its slot, to be continued. Rows in flight still count: it waits until they are answered."""
        table = executor.table
        slot = sequence.slot
        pending = int(table.planned_length[slot] - table.length[slot])
        self._vacate(executor, sequence)
        sequence.preemptions += 1
        sequence.mark_at_preemption = len(sequence.outputs) // 4
        sequence.continued = True
        self.preemptions += 1
        if pending:
            sequence.state = State.SETTLING
            sequence.pending_rows = pending
            executor.settling[(slot, sequence.generation)] = sequence
        else:
            self.requeue(sequence, now)

    def requeue(self, sequence: Sequence, now: float) -> None:
        """Into its model's queue, as a continuation."""
        sequence.executor = None
        sequence.pending_rows = 0
        sequence.continued = True
        sequence.stream.model.queue.push(sequence, now)

    def detach(self, sequence: Sequence) -> None:
        """Out of wherever it is, for good. Its rows in flight will be dropped."""
        executor = sequence.executor
        if sequence.state is State.WAITING:
            sequence.stream.model.queue.remove(sequence)
        elif sequence.state is State.RUNNING:
            assert executor is not None
            self._vacate(executor, sequence, last=True)
            self._unanswered.ended(executor)
        elif sequence.state is State.SETTLING:
            assert executor is not None
            del executor.settling[(_slot_of(executor, sequence), sequence.generation)]
            self._unanswered.ended(executor)
        sequence.state = State.ENDED
        sequence.executor = None

    def abandon(self, executor: ExecutorState) -> list[Sequence]:
        """All sequences of an executor whose epoch is over, with their committed outputs. What the executor held is
        worth nothing any more: the caller starts a new epoch or drops the session."""
        sequences = executor.residents()
        for sequence in sequences:
            executor.table.flush(sequence.slot)
            self._charge_outputs(executor, sequence)
            sequence.slot = -1
        sequences += executor.settling.values()
        for sequence in sequences:
            sequence.executor = None
            sequence.state = State.ENDED  # until the caller queues or fails it
            sequence.cache_tip = None
            sequence.cache_count = 0
            sequence.numerics = executor.numerics
        return sequences

    def _charge_outputs(self, executor: ExecutorState, sequence: Sequence) -> None:
        """What its tenant was served since it was admitted here."""
        table, slot = executor.table, sequence.slot
        executor.model.queue.shares.charge(sequence.salt, table.length.item(slot) - table.admitted_length[slot])

    def _vacate(self, executor: ExecutorState, sequence: Sequence, last: bool = False) -> None:
        slot = sequence.slot
        executor.table.flush(slot)
        self.register(executor, sequence, last)
        executor.prefilling.pop(slot, None)
        if sequence.fills:
            self._announce(executor, sequence, -1)
        self._charge_outputs(executor, sequence)
        executor.pool.release(executor.table.drop(slot))
        executor.released.append(slot)
        if executor.isolated is sequence:
            executor.isolated = None
        sequence.cache_tip = None
        sequence.cache_count = 0
        sequence.numerics = executor.numerics

    def _announce(self, executor: ExecutorState, sequence: Sequence, block: int) -> None:
        """It computes this block next (-1: none any more). Who finds all the blocks before it misses this one first, so
        the others that it will compute need no announcement."""
        filling, before = executor.filling, sequence.fills
        if before and filling.get(before) is sequence:
            del filling[before]
        sequence.fills = b""
        known = executor.table.admitted_length[sequence.slot] // executor.block_size
        if 0 <= block < min(known, sequence.num_hashes):
            sequence.fills = sequence.hash_at(block)
            filling.setdefault(sequence.fills, sequence)

    def _most_hits(self, executor: ExecutorState, sequence: Sequence) -> int:
        """How many blocks may be found: at least one token is left to compute, and every position whose logits score
        a prompt token that still owes its logprobs."""
        if not (self._cache_on and sequence.num_hashes):
            return 0
        end = sequence.prompt_scored if sequence.owes_prompt_logprobs else sequence.known
        return (end - 1) // executor.block_size


def _slot_of(executor: ExecutorState, sequence: Sequence) -> int:
    return next(slot for (slot, _), resident in executor.settling.items() if resident is sequence)
