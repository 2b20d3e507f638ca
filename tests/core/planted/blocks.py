"""Bugs of blocks and of the prefix cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from scheduler_svc import prefix_hash
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.prefix_run import Run
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import SlotTable
from tests.core import world
from tests.core.planted.registry import Patch, bug

# -- blocks ----------------------------------------------------------------------------------------------------------


@bug("reference counts of blocks|free .* cached .* owned")
def blocks_leak_at_a_release(patch: Patch) -> None:
    true = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, blocks: true(self, blocks[:-1]))


@bug("a block was released twice|block was released twice|reference counts")
def a_block_is_released_twice(patch: Patch) -> None:
    true = BlockPool.release

    def release(self: BlockPool, blocks: list[int]) -> None:
        true(self, blocks)
        true(self, blocks[:1])

    patch.setattr(BlockPool, "release", release)


@bug("is held|a block is in two states|owned is|reference counts")
def an_owned_block_is_given_out(patch: Patch) -> None:
    true = BlockPool.allocate

    def allocate(self: BlockPool, count: int) -> list[int]:
        blocks = true(self, count)
        held = np.flatnonzero(self.refs > 0).tolist()
        return [held[0], *blocks[1:]] if count and len(held) > count else blocks

    patch.setattr(BlockPool, "allocate", allocate)


@bug("a block is free twice|free .* cached .* owned|a block is in two states")
def a_free_block_is_kept_twice(patch: Patch) -> None:
    true = BlockPool.release

    def release(self: BlockPool, blocks: list[int]) -> None:
        true(self, blocks)
        self._stack += self._stack[-1:]

    patch.setattr(BlockPool, "release", release)


@bug("shared block .* holds|the two indices|in no run|cannot be found|a block is in two states|already findable")
def an_evicted_block_can_still_be_found(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_evicted", lambda self, blocks: None)


@bug("no block for")
def a_row_is_run_without_a_block_for_it(patch: Patch) -> None:
    true = SlotTable.take

    def take(self: SlotTable, sequence: Sequence, blocks: list[int], computed: int, block_size: int) -> int:
        slot = true(self, sequence, blocks, computed, block_size)
        self.capacity[slot] += 1
        return slot

    patch.setattr(SlotTable, "take", take)
    patch.setattr(world, "check_all", lambda core: [])  # it says so at once: let the executor see it


@bug("capacity")
def the_capacity_is_counted_wrong(patch: Patch) -> None:
    true = SlotTable.take

    def take(self: SlotTable, sequence: Sequence, blocks: list[int], computed: int, block_size: int) -> int:
        slot = true(self, sequence, blocks, computed, block_size)
        self.capacity[slot] += 1
        return slot

    patch.setattr(SlotTable, "take", take)


# -- prefix cache ----------------------------------------------------------------------------------------------------


def collide(patch: Patch) -> None:
    """Hashes of one byte of entropy: many contents under one hash."""
    true_root, true_extend = prefix_hash.root_hash, prefix_hash.extend_hash
    size = prefix_hash.HASH_BYTES

    def short(digest: bytes) -> bytes:
        return bytes([digest[0] & 3]) * size

    patch.setattr(prefix_hash, "root_hash", lambda *a: short(true_root(*a)))
    patch.setattr(prefix_hash, "extend_hash", lambda *a: short(true_extend(*a)))


@bug("shared block .* holds")
def a_hash_is_trusted_alone(patch: Patch) -> None:
    collide(patch)
    patch.setattr(Run, "follows", lambda self, place, salt: True)

    def common(self: Run, start: int, tokens: bytes, at: int, most: int, width: int) -> int:
        return min(most, len(self.blocks) - start)

    patch.setattr(Run, "common", common)


@bug("shared block .* holds")
def only_the_first_block_of_a_run_is_compared(patch: Patch) -> None:
    true = Run.common

    def common(self: Run, start: int, tokens: bytes, at: int, most: int, width: int) -> int:
        return min(most, len(self.blocks) - start) if true(self, start, tokens, at, most, width) else 0

    patch.setattr(Run, "common", common)


@bug("findable before its answer|shared block .* holds|findable before it was filled")
def a_block_is_findable_before_the_answer(patch: Patch) -> None:
    true = Residency.admit

    def admit(self: Residency, executor: ExecutorState, sequence: Sequence, hits: Any) -> int:
        slot = true(self, executor, sequence, hits)
        executor.table.done[slot] = sequence.known - 1
        self.register(executor, sequence)
        return slot

    patch.setattr(Residency, "admit", admit)
    patch.setattr(world, "check_all", lambda core: [])


@bug("committed .*, computed|findable before it was filled")
def prefill_is_committed_when_it_is_planned(patch: Patch) -> None:
    true = Residency.admit

    def admit(self: Residency, executor: ExecutorState, sequence: Sequence, hits: Any) -> int:
        slot = true(self, executor, sequence, hits)
        executor.table.done[slot] = sequence.known
        return slot

    patch.setattr(Residency, "admit", admit)


@bug("findable before it was filled|committed")
def registered_too_far(patch: Patch) -> None:
    true = SlotTable.committed_kv

    def committed_kv(self: SlotTable, slot: int) -> int:
        return true(self, slot) - 4

    def register(self: Residency, executor: ExecutorState, sequence: Sequence, last: bool = False) -> None:
        true_register(self, executor, sequence, last)
        patch.setattr(SlotTable, "committed_kv", committed_kv)

    true_register = Residency.register
    patch.setattr(Residency, "register", register)


@bug("shared block .* holds")
def a_block_is_shared_before_it_is_written(patch: Patch) -> None:
    true = Residency.admit

    def admit(self: Residency, executor: ExecutorState, sequence: Sequence, hits: Any) -> int:
        slot = true(self, executor, sequence, hits)
        sequence.cache_count = sequence.known // executor.block_size
        return slot

    patch.setattr(Residency, "admit", admit)
    patch.setattr(world, "check_all", lambda core: [])


@bug("evicted before those behind it|the two indices|shared block .* holds")
def a_run_grows_by_blocks_of_who_does_not_hold_it(patch: Patch) -> None:
    true = PrefixCache.grows
    patch.setattr(PrefixCache, "grows", lambda self, place, held: true(self, place, place[0].blocks[-1]))
