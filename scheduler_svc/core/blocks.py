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
numpy: most calls are for one sequence's handful of blocks, where a vector operation costs more than the loop. No
dictionary of all blocks either: when a large one grows it stops everything for milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from protos.wire import Int32

_NO_BLOCK = -1


class BlockPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.owned = 0
        self.cached = 0
        self.found_in: list[object] = []  # of each block handed out at least once: where it is found (prefix_cache.py)
        self.on_evict: Callable[[list[int]], None] = nothing_to_forget
        self._refs: list[int] = []  # of the same blocks
        self._stack: list[int] = []  # free ones of them
        # The cached ones as a list linked both ways, least recently used first.
        self._before: list[int] = []
        self._behind: list[int] = []
        self._first = self._last = _NO_BLOCK

    @property
    def free(self) -> int:
        return len(self._stack) + self.total - len(self._refs)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free and evictable ones."""
        return len(self._stack) + self.total - len(self._refs) + self.cached

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
        missing = count - len(blocks)
        if missing:
            fresh = min(missing, self.total - len(refs))
            if fresh:
                blocks += range(len(refs), len(refs) + fresh)
                refs += [1] * fresh
                for column in (self._before, self._behind):
                    column += [_NO_BLOCK] * fresh
                self.found_in += [None] * fresh
            if missing > fresh:
                blocks += self._evict(missing - fresh)
        self.owned += count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference on each block of a prefix hit."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                self._unlink(block)
                self.owned += 1
            refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each block of a sequence, given in sequence order (tails are evicted first)."""
        refs, found_in, stack, before, behind = self._refs, self.found_in, self._stack, self._before, self._behind
        if 0 in [refs[block] for block in blocks]:
            raise RuntimeError("a block was released twice")
        freed = cached = 0
        last = self._last
        for block in reversed(blocks):
            left = refs[block] - 1
            refs[block] = left
            if left:
                continue
            if found_in[block] is None:
                stack.append(block)
                freed += 1
                continue
            cached += 1
            before[block] = last
            if last < 0:
                self._first = block
            else:
                behind[last] = block
            last = block
        if cached:
            behind[last] = _NO_BLOCK
            self._last = last
            self.cached += cached
        self.owned -= freed + cached

    def forget(self, block: int) -> None:
        """The prefix cache no longer finds this block."""
        if self._refs[block] == 0:
            self._unlink(block)
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
        found = np.zeros(self.total, dtype=bool)
        found[: len(self.found_in)] = [place is not None for place in self.found_in]
        return found

    def lru(self) -> Iterator[int]:
        """The cached blocks, least recently used first."""
        block = self._first
        while block >= 0:
            yield block
            block = self._behind[block]

    def free_ids(self) -> Int32:
        """Every free id."""
        return np.array([*self._stack, *range(len(self._refs), self.total)], dtype=np.int32)

    # -- the cached ones ---------------------------------------------------------------------------------------------

    def _unlink(self, block: int) -> None:
        before, behind = self._before[block], self._behind[block]
        if before < 0:
            self._first = behind
        else:
            self._behind[before] = behind
        if behind < 0:
            self._last = before
        else:
            self._before[behind] = before
        self.cached -= 1

    def _evict(self, count: int) -> list[int]:
        """The least recently used blocks, taken out of the prefix cache, each with one reference."""
        refs, behind, block = self._refs, self._behind, self._first
        blocks = []
        for _ in range(count):
            blocks.append(block)
            refs[block] = 1
            block = behind[block]
        self._first = block
        if block < 0:
            self._last = _NO_BLOCK
        else:
            self._before[block] = _NO_BLOCK
        self.cached -= count
        self.on_evict(blocks)
        return blocks


def nothing_to_forget(blocks: list[int]) -> None:
    """A pool without a prefix cache."""
