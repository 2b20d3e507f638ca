"""How a sequence enters and leaves an executor: the only code that gives or takes slots and blocks.

::

    WAITING --admit--> RUNNING --preempt--> SETTLING --last row answered--> WAITING
                          |        `------- nothing unanswered -------------^
                          `--detach (finished, cancelled, failed)--> out

There is one way out of a slot (`_vacate`), so nothing can be released twice. Slots and blocks given up are free at
once: the plan that gives them out again runs after every plan that used them (DESIGN 2).
"""

from __future__ import annotations

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.prefix_cache import Entry
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.prefix_hash import HASH_BYTES, extend_hash


class Residency:
    def __init__(self, config: CoreConfig) -> None:
        self._cache_on = config.prefix_cache
        self.preemptions = 0
        self.prefix_hits = 0  # blocks found at admissions, over all executors

    # -- in ----------------------------------------------------------------------------------------------------------

    def lookup(self, executor: ExecutorState, sequence: Sequence) -> list[Entry]:
        """The findable prefix of this sequence there."""
        most = self._most_hits(executor, sequence)
        hashed = len(sequence.hashes) // HASH_BYTES
        if hashed == 0 or most == 0:
            return []
        first = executor.cache.by_hash.get(bytes(sequence.hashes[:HASH_BYTES]))
        if first is None:  # the usual miss: no copy of the tokens
            return []
        return executor.cache.lookup(sequence.hashes, sequence.tokens(), sequence.salt, most)

    def being_filled(self, executor: ExecutorState, sequence: Sequence, hits: int) -> Sequence | None:
        """The sequence that computes right now the first block that this one misses."""
        if hits >= self._most_hits(executor, sequence):
            return None
        return executor.filling.get(bytes(sequence.hashes[hits * HASH_BYTES : (hits + 1) * HASH_BYTES]))

    def blocks_needed(self, executor: ExecutorState, sequence: Sequence, hits: list[Entry]) -> int:
        """How many available blocks an admission takes: new ones, and hits that are evictable now."""
        total = -(-sequence.known // executor.block_size)
        idle_hits = sum(1 for entry in hits if executor.pool.refs[entry.block] == 0)
        return total - len(hits) + idle_hits

    def admit(self, executor: ExecutorState, sequence: Sequence, hits: list[Entry]) -> int:
        """Give a waiting sequence a slot and the blocks for all its known tokens. Returns the slot."""
        sequence.stream.model.queue.remove(sequence)
        shared = [entry.block for entry in hits]
        executor.pool.share(shared)
        total = -(-sequence.known // executor.block_size)
        blocks = shared + executor.pool.allocate(total - len(shared)).tolist()
        computed = len(shared) * executor.block_size
        slot = executor.table.take(sequence, blocks, computed, executor.block_size)
        sequence.state = State.RUNNING
        sequence.executor = executor
        sequence.cache_count = len(hits)
        sequence.cache_tip = hits[-1] if hits else None
        sequence.waits_for = ""
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(computed, sequence.prompt_len)
        if not sequence.continued:
            executor.model.queue.shares.charge(sequence.salt, sequence.known - computed)
        self.prefix_hits += len(hits)
        executor.cache.hits += len(hits)
        executor.cache.lookups += total
        executor.prefilling[slot] = sequence
        executor.step_age.admitted(sequence)
        if self._cache_on and sequence.uses_cache:
            for i in range(len(hits), min(len(sequence.hashes) // HASH_BYTES, sequence.known // executor.block_size)):
                executor.filling.setdefault(bytes(sequence.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]), sequence)
        return slot

    # -- while there -------------------------------------------------------------------------------------------------

    def register(self, executor: ExecutorState, sequence: Sequence) -> None:
        """Make every full block that answered plans have filled findable (its tokens must be out of the tail)."""
        if not (self._cache_on and sequence.uses_cache):
            return
        size = executor.block_size
        full = executor.table.committed_kv(sequence.slot) // size
        if sequence.cache_count >= full:
            return
        parent = sequence.cache_tip
        if parent is not None and not parent.live:
            return  # the chain was cut by an eviction: what follows could not be found
        blocks = executor.table.blocks[sequence.slot]
        width = 4 * size
        tokens = sequence.prompt if full * width <= len(sequence.prompt) else sequence.tokens()
        for i in range(sequence.cache_count, full):
            content = tokens[i * width : (i + 1) * width]
            at = i * HASH_BYTES
            if at == len(sequence.hashes):
                if i == 0:
                    return  # a prompt shorter than a block came without hashes: its chain has no root here
                sequence.hashes += extend_hash(bytes(sequence.hashes[at - HASH_BYTES : at]), content)
            digest = bytes(sequence.hashes[at : at + HASH_BYTES])
            parent = executor.cache.register(digest, parent, sequence.salt, content, blocks[i])
            if executor.filling.get(digest) is sequence:
                del executor.filling[digest]
        sequence.cache_tip = parent
        sequence.cache_count = full

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
            self._vacate(executor, sequence)
        elif sequence.state is State.SETTLING:
            assert executor is not None
            del executor.settling[(_slot_of(executor, sequence), sequence.generation)]
        sequence.state = State.ENDED
        sequence.executor = None

    def abandon(self, executor: ExecutorState) -> list[Sequence]:
        """All sequences of an executor whose epoch is over, with their committed outputs. What the executor held is
        worth nothing any more: the caller starts a new epoch or drops the session."""
        sequences = executor.residents()
        for sequence in sequences:
            executor.table.flush(sequence.slot)
            sequence.slot = -1
        sequences += executor.settling.values()
        for sequence in sequences:
            sequence.executor = None
            sequence.state = State.ENDED  # until the caller queues or fails it
            sequence.cache_tip = None
            sequence.cache_count = 0
            sequence.numerics = executor.numerics
        return sequences

    def _vacate(self, executor: ExecutorState, sequence: Sequence) -> None:
        slot = sequence.slot
        executor.table.flush(slot)
        self.register(executor, sequence)
        executor.prefilling.pop(slot, None)
        for i in range(sequence.cache_count, len(sequence.hashes) // HASH_BYTES):
            digest = bytes(sequence.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES])
            if executor.filling.get(digest) is sequence:
                del executor.filling[digest]
        outputs = int(executor.table.length[slot] - executor.table.admitted_length[slot])
        executor.model.queue.shares.charge(sequence.salt, outputs)
        executor.pool.release(executor.table.drop(slot))
        executor.released.append(slot)
        if executor.isolated is sequence:
            executor.isolated = None
        sequence.cache_tip = None
        sequence.cache_count = 0
        sequence.numerics = executor.numerics

    def _most_hits(self, executor: ExecutorState, sequence: Sequence) -> int:
        """How many blocks may be found: at least one token is left to compute, and every position whose logits score
        a prompt token that still owes its logprobs."""
        if not (self._cache_on and sequence.uses_cache):
            return 0
        end = sequence.prompt_scored if sequence.owes_prompt_logprobs else sequence.known
        return (end - 1) // executor.block_size


def _slot_of(executor: ExecutorState, sequence: Sequence) -> int:
    return next(slot for (slot, _), resident in executor.settling.items() if resident is sequence)
