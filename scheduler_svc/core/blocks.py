"""The KV blocks of one executor: who holds them, which are free, which are kept because they can be found again.

Every block is in exactly one of three states, and after every event ``free + cached + owned == total``::

            allocate                        release, not findable
    free  ------------>  owned (refs >= 1) ----------------------->  free
      ^                    ^     |  release, findable
      |  evict / forget    |     v
      +----------------- cached (refs == 0, in LRU order)
                           share (a prefix hit)

Cached blocks wait for eviction in *links*: what one sequence gave up at one moment, in its order, so that a whole
prefix is put there, found again or evicted at once. Ids never yet used are handed out by a counter, and what is kept
of a block is kept from then on, so a pool costs memory only for what it used (an executor states its size; the core
does not believe it with its memory). Plain lists, not numpy: most calls are for one sequence's handful of blocks, where
a vector operation costs more than the loop. No dictionary of all blocks either: when a large one grows it stops
everything for milliseconds. ``Any`` stands where an int only passes through: in the compiled core
(deploy/compile_core.py) one that is taken out as ``int`` and put in again is a new object each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from protos.wire import Int32

_NO_LINK = -1


class BlockPool:
    def __init__(self, total: int) -> None:
        self.total = total
        self.owned = 0
        self.cached = 0
        self.found_in: list[object] = []  # of each block handed out at least once: where it is found (prefix_cache.py)
        self.on_evict: Callable[[list[int]], None] = nothing_to_forget
        self._refs: list[Any] = []  # ints, of the same: how many hold it; 0: free; below: `~link` that it waits in
        self._stack: list[int] = []  # free ones of them
        # The links as a list linked both ways, least recently used first.
        self._waiting: list[list[int]] = []  # by link: its blocks, evicted from the end on
        self._before: list[int] = []
        self._behind: list[int] = []
        self._spare: list[int] = []  # links without blocks
        self._first = self._last = _NO_LINK

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
                self.found_in += [None] * fresh
            if missing > fresh:
                blocks += self._evict(missing - fresh)
        self.owned += count
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more reference on each block of a prefix hit."""
        refs = self._refs
        idle = [block for block in blocks if refs[block] < 0]
        if idle:
            self._withdraw(idle)
            self.owned += len(idle)
        for block in blocks:
            refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference on each block of a sequence, given in sequence order (tails are evicted first)."""
        refs, found_in = self._refs, self.found_in
        mark: Any = ~(self._spare[-1] if self._spare else len(self._waiting))  # the link that it will be
        given: list[Any] = blocks
        cached, free = list[Any](), list[Any]()
        for item in given:
            block: int = item
            held: int = refs[block]
            if held != 1:
                if held < 1:
                    raise RuntimeError("a block was released twice")
                refs[block] = held - 1
            elif found_in[block] is None:
                refs[block] = 0
                free.append(item)
            else:
                refs[block] = mark
                cached.append(item)
        self.owned -= len(cached) + len(free)
        if free:
            free.reverse()
            self._stack += free
        if cached:
            self._append(cached)

    def forget(self, blocks: list[int]) -> None:
        """The prefix cache no longer finds these."""
        refs = self._refs
        idle = [block for block in blocks if refs[block] < 0]
        if idle:
            self._withdraw(idle)
            self._stack += idle

    def idle(self, blocks: list[int]) -> int:
        """How many of these nobody holds."""
        refs = self._refs
        return [refs[block] > 0 for block in blocks].count(False)

    def yields(self, blocks: list[int]) -> int:
        """How many blocks would truly come free if a sequence gave up these."""
        refs = self._refs
        return [refs[block] for block in blocks].count(1)

    # -- for checks --------------------------------------------------------------------------------------------------

    @property
    def refs(self) -> Int32:
        """[total] references on each block."""
        return np.array([max(refs, 0) for refs in self._refs] + [0] * (self.total - len(self._refs)), dtype=np.int32)

    @property
    def findable(self) -> npt.NDArray[np.bool_]:
        """[total] which blocks the prefix cache finds."""
        found = np.zeros(self.total, dtype=bool)
        found[: len(self.found_in)] = [place is not None for place in self.found_in]
        return found

    def lru(self) -> Iterator[int]:
        """The cached blocks, least recently used first."""
        link = self._first
        while link >= 0:
            yield from reversed(self._waiting[link])
            link = self._behind[link]

    def free_ids(self) -> Int32:
        """Every free id."""
        return np.array([*self._stack, *range(len(self._refs), self.total)], dtype=np.int32)

    # -- the cached ones ---------------------------------------------------------------------------------------------

    def _append(self, blocks: list[int]) -> None:
        """A new last link, of these blocks."""
        last = self._last
        if self._spare:
            link = self._spare.pop()
            self._waiting[link] = blocks
            self._before[link] = last
        else:
            link = len(self._waiting)
            self._waiting.append(blocks)
            self._before.append(last)
            self._behind.append(_NO_LINK)
        if last < 0:
            self._first = link
        else:
            self._behind[last] = link
        self._last = link
        self.cached += len(blocks)

    def _drop(self, link: int) -> None:
        """A link of which no block is left."""
        before, behind = self._before[link], self._behind[link]
        if before < 0:
            self._first = behind
        else:
            self._behind[before] = behind
        if behind < 0:
            self._last = before
        else:
            self._before[behind] = before
        self._behind[link] = _NO_LINK
        self._waiting[link] = []
        self._spare.append(link)

    def _withdraw(self, blocks: list[int]) -> None:
        """Take cached blocks out of their links, whatever they are next to."""
        links: dict[int, list[int]] = {}
        for block in blocks:
            links.setdefault(~self._refs[block], []).append(block)
            self._refs[block] = 0
        for link, gone in links.items():
            waiting = self._waiting[link]
            if waiting[: len(gone)] == gone:  # a prefix that is found again
                del waiting[: len(gone)]
            else:
                out = set(gone)
                self._waiting[link] = waiting = [block for block in waiting if block not in out]
            if not waiting:
                self._drop(link)
        self.cached -= len(blocks)

    def _evict(self, count: int) -> list[int]:
        """The least recently used blocks, taken out of the prefix cache, each with one reference."""
        refs = self._refs
        blocks: list[int] = []
        while len(blocks) < count:
            link = self._first
            gone, missing = self._waiting[link], count - len(blocks)
            if len(gone) <= missing:
                self._drop(link)
            else:
                waiting, gone = gone, gone[-missing:]
                del waiting[-missing:]
            self.on_evict(gone)
            for block in gone:
                refs[block] = 1
            gone.reverse()
            blocks += gone
        self.cached -= count
        return blocks


def nothing_to_forget(blocks: list[int]) -> None:
    """A pool without a prefix cache."""
