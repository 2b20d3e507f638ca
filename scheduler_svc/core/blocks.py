"""The KV blocks of one executor: who holds them, which are free, which are kept because they can be found again.

Every block is in exactly one of three states, and after every event ``free + cached + owned == total``::

            allocate                        release, not findable
    free  ------------>  owned (refs >= 1) ----------------------->  free
      ^                    ^     |  release, findable
      |  evict / forget    |     v
      +----------------- cached (refs == 0, in LRU order)
                           share (a prefix hit)

Ids never yet used are handed out by a counter, and what is kept of a block is kept from then on, so a pool costs memory
only for what it used (an executor states its size; the core does not believe it with its memory). Plain lists, not
numpy: most calls are for one sequence's handful of blocks, where a vector operation costs more than the loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container

import numpy as np
import numpy.typing as npt

from protos.wire import Int32


class BlockPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.owned = 0
        self.lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self.in_cache: Container[int] = ()  # the prefix cache's blocks, kept by it
        self.on_evict: Callable[[list[int]], None] = nothing_to_forget
        self._refs: list[int] = []  # of the blocks handed out at least once
        self._stack: list[int] = []  # free ones of them

    @property
    def free(self) -> int:
        return len(self._stack) + self.total - len(self._refs)

    @property
    def cached(self) -> int:
        return len(self.lru)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free and evictable ones."""
        return len(self._stack) + self.total - len(self._refs) + len(self.lru)

    def allocate(self, count: int) -> list[int]:
        """``count`` block ids, each with one reference. Raises RuntimeError when `available` is less (a bug)."""
        if count > self.available:
            raise RuntimeError(f"{count} blocks asked for, {self.available} available")
        refs, stack = self._refs, self._stack
        left = max(0, len(stack) - count)
        blocks = stack[left:]
        del stack[left:]
        for block in blocks:
            refs[block] = 1
        fresh = min(count - len(blocks), self.total - len(refs))
        if fresh:
            blocks += range(len(refs), len(refs) + fresh)
            refs += [1] * fresh
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        self.owned += count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference on each block of a prefix hit."""
        refs, lru = self._refs, self.lru
        for block in blocks:
            if refs[block] == 0:
                del lru[block]
                self.owned += 1
            refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each block of a sequence, given in sequence order (tails are evicted first)."""
        refs, in_cache, lru, stack = self._refs, self.in_cache, self.lru, self._stack
        counts = [refs[block] for block in blocks]
        if 0 in counts:
            raise RuntimeError("a block was released twice")
        if counts.count(1) == len(blocks):  # nobody else holds any of them
            for block in reversed(blocks):
                refs[block] = 0
                if block in in_cache:
                    lru[block] = None
                else:
                    stack.append(block)
            self.owned -= len(blocks)
            return
        for block in reversed(blocks):
            left = refs[block] - 1
            refs[block] = left
            if left == 0:
                self.owned -= 1
                if block in in_cache:
                    lru[block] = None
                else:
                    stack.append(block)

    def forget(self, block: int) -> None:
        """The prefix cache no longer finds this block."""
        if self._refs[block] == 0:
            del self.lru[block]
            self._stack.append(block)

    def idle(self, blocks: list[int]) -> int:
        """How many of these nobody holds."""
        refs = self._refs
        return [refs[block] for block in blocks].count(0)

    def yields(self, blocks: list[int]) -> int:
        """How many blocks would truly come free if a sequence gave up these."""
        refs = self._refs
        return [refs[block] for block in blocks].count(1)

    # -- for checks --------------------------------------------------------------------------------------------------

    @property
    def refs(self) -> Int32:
        """[total] references on each block."""
        return np.array(self._refs + [0] * (self.total - len(self._refs)), dtype=np.int32)

    @property
    def findable(self) -> npt.NDArray[np.bool_]:
        """[total] which blocks the prefix cache finds."""
        return np.array([block in self.in_cache for block in range(self.total)], dtype=bool)

    def free_ids(self) -> Int32:
        """Every free id."""
        return np.array([*self._stack, *range(len(self._refs), self.total)], dtype=np.int32)

    def _evict(self, count: int) -> list[int]:
        """The least recently used blocks, taken out of the prefix cache, each with one reference."""
        pop, refs = self.lru.popitem, self._refs
        blocks = [pop(False)[0] for _ in range(count)]
        for block in blocks:
            refs[block] = 1
        self.on_evict(blocks)
        return blocks


def nothing_to_forget(blocks: list[int]) -> None:
    """A pool without a prefix cache."""
