"""The KV blocks of one executor: who holds them, which are free, which are kept because they can be found again.

Every block is in exactly one of three states, and after every event ``free + cached + owned == total``::

            allocate                        release, not findable
    free  ------------>  owned (refs >= 1) ----------------------->  free
      ^                    ^     |  release, findable
      |  evict / forget    |     v
      +----------------- cached (refs == 0, in LRU order)
                           share (a prefix hit)

Ids never yet used are handed out by a counter and freed ids live on a numpy stack, so a pool costs memory only for
what it used (an executor states its size; the core does not believe it with its memory).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from protos.wire import Int32


class BlockPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.refs = np.zeros(total, dtype=np.int32)
        self.findable = np.zeros(total, dtype=bool)  # in the prefix cache
        self.owned = 0
        self.lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self.on_evict: Callable[[int], None] = _nothing_to_forget
        self._stack = np.empty(total, dtype=np.int32)
        self._stacked = 0
        self._fresh = 0  # ids below were handed out at least once

    @property
    def free(self) -> int:
        return self._stacked + self.total - self._fresh

    @property
    def cached(self) -> int:
        return len(self.lru)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free and evictable ones."""
        return self.free + len(self.lru)

    def allocate(self, count: int) -> Int32:
        """[count] block ids, each with one reference. Raises RuntimeError when `available` is less: a caller's bug."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks asked for, {self.available} available")
        blocks = np.empty(count, dtype=np.int32)
        taken = min(count, self._stacked)
        if taken:
            blocks[:taken] = self._stack[self._stacked - taken : self._stacked]
            self._stacked -= taken
        fresh = min(count - taken, self.total - self._fresh)
        if fresh:
            blocks[taken : taken + fresh] = np.arange(self._fresh, self._fresh + fresh, dtype=np.int32)
            self._fresh += fresh
            taken += fresh
        while taken < count:
            block, _ = self.lru.popitem(last=False)
            self.findable[block] = False
            self.on_evict(block)
            blocks[taken] = block
            taken += 1
        self.refs[blocks] = 1
        self.owned += count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference on each block of a prefix hit."""
        for block in blocks:
            if self.refs[block] == 0:
                del self.lru[block]
                self.owned += 1
            self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each block of a sequence, given in sequence order (tails are evicted first)."""
        if not blocks:
            return
        ids = np.array(blocks, dtype=np.int32)
        left = self.refs[ids] - 1
        if left.min() < 0:
            raise RuntimeError("a block was released twice")
        self.refs[ids] = left
        dropped = ids[left == 0]
        self.owned -= len(dropped)
        findable = self.findable[dropped]
        if findable.any():
            for block in dropped[findable][::-1].tolist():
                self.lru[block] = None
            dropped = dropped[~findable]
        self._push(dropped)

    def forget(self, block: int) -> None:
        """The prefix cache no longer finds this block."""
        self.findable[block] = False
        if self.refs[block] == 0:
            del self.lru[block]
            self._push(np.array([block], dtype=np.int32))

    def yields(self, blocks: list[int]) -> int:
        """How many blocks would truly come free if a sequence gave up these."""
        return int(np.count_nonzero(self.refs[np.array(blocks, dtype=np.int32)] == 1)) if blocks else 0

    def free_ids(self) -> Int32:
        """Every free id, for the invariant checks."""
        return np.concatenate([self._stack[: self._stacked], np.arange(self._fresh, self.total, dtype=np.int32)])

    def _push(self, blocks: Int32) -> None:
        self._stack[self._stacked : self._stacked + len(blocks)] = blocks
        self._stacked += len(blocks)


def _nothing_to_forget(block: int) -> None:
    """A pool without a prefix cache."""
