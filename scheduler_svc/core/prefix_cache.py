"""Which full blocks of one executor can be found again, and under what content.

Blocks that one sequence filled one after the other form a *run*: it is found by the chained hash of its first block,
and the blocks after that by comparing tokens::

    by_hash    hash of A   ->  run 1: blocks A B C D
               hash of C'  ->  run 2: blocks C' D'        after 2 blocks of run 1

A run is trusted for its content, never for its hash: a hit compares all the tokens, and the place that the run follows:
the parent's identity (``uid``, which stands for the whole chain before it) and how many blocks of it. The first run of
a chain compares the tenant's salt. A run grows at its end while nothing else may follow there, so what a sequence
computes after its prompt costs no hashes. Runs lose blocks from their ends (tails are evicted first) and never regain
any: one that lost a block grows no more. A block becomes findable only when the plan that filled it was answered
(commit.py).
"""

from __future__ import annotations

from scheduler_svc.core.blocks import BlockPool, nothing_to_forget
from scheduler_svc.core.prefix_run import Place, Run, is_there

_MOST_GROWN = 2**18  # bytes of tokens, which are copied when a run grows


class Prefix:
    """Findable blocks from the start of a sequence on. Not changed once made."""

    __slots__ = ("_blocks", "count", "parts")

    def __init__(self, parts: list[Place]) -> None:
        self.parts = parts  # (run, how many of its blocks), one after the other
        self.count = sum([length for _, length in parts])
        self._blocks: list[int] | None = None

    @property
    def end(self) -> Place | None:
        return self.parts[-1] if self.parts else None

    @property
    def blocks(self) -> list[int]:
        """Not to be changed."""
        if self._blocks is None:
            self._blocks = [block for run, length in self.parts for block in run.blocks[:length]]
        return self._blocks

    def still_there(self) -> Prefix:
        """What is left of it."""
        parts: list[Place] = []
        for place in self.parts:
            if not is_there(place):
                left = len(place[0].blocks)
                return Prefix([*parts, (place[0], left)] if left else parts)
            parts.append(place)
        return self

    def first(self, most: int) -> Prefix:
        if self.count <= most:
            return self
        parts: list[Place] = []
        for run, length in self.parts:
            if most <= 0:
                break
            parts.append((run, min(length, most)))
            most -= length
        return Prefix(parts)


NOTHING = Prefix([])


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.by_hash: dict[bytes, Run] = {}  # by that of its first block
        self.hits = 0  # blocks
        self.lookups = 0  # blocks looked for
        self.dropped = 0  # blocks, ever: what was found while this stands still is there
        self.blocks = 0  # that can be found
        self._pool = pool
        self._width = 4 * block_size
        self._next_uid = 1
        pool.on_evict = self._evicted

    def extend(self, found: Prefix, hashes: list[bytes], tokens: bytes, salt: str, most: int) -> Prefix:
        """``found``, a findable prefix, as far as it goes on, up to ``most`` blocks. ``tokens``: raw int32 from the
        start."""
        parts, most = found.parts.copy(), min(most, len(hashes))
        if self._walk(parts, found.count, hashes, tokens, salt, most) == found.count:
            return found
        return Prefix(parts)

    def register(
        self, digests: list[bytes], place: Place | None, salt: str, tokens: bytes, blocks: list[int], held: int = -1
    ) -> Place | None:
        """``blocks`` now hold ``tokens``, a block's each, one after the other and all behind ``place``. Returns the
        place behind the last content: where one was there before it stays (and its blocks are the ones found).
        ``digests``: of each block; the first one's if `needs_all` says no, none if `grows` says yes.
        ``held``: the block that their sequence holds before them."""
        count, width = len(blocks), self._width
        if count != len(tokens) // width:
            raise ValueError(f"{count} blocks for {len(tokens)} bytes of tokens")
        if place is not None and self.grows(place, held):
            run = place[0]
            self._place_in(run, blocks)
            run.tokens += tokens
            run.blocks += blocks
            return run, place[1] + count
        at = 0
        if count and self.needs_all(place, digests[0]):
            parts = [place] if place is not None else []
            at = self._walk(parts, 0, digests, tokens, salt, count)
            place = parts[-1] if parts else None
        if at == count:
            return place
        other = self.by_hash.get(digests[at])
        if other is not None:
            self._drop(other)  # another chain under this hash, or one whose parent is gone: cannot be reached by us
        new = blocks[at:]
        parent, after = 0, 0
        if place is not None:
            parent, after = place[0].uid, place[1]
            place[0].grows = False
        run = Run(self._next_uid, digests[at], parent, after, salt, tokens[at * width :], new)
        self._next_uid += 1
        self._place_in(run, new)
        self.by_hash[digests[at]] = run
        return run, count - at

    def grows(self, place: Place, held: int) -> bool:
        """Whether what comes behind ``place`` needs no hash, because its run takes it. Nothing may be there yet, and
        who lets a run grow must hold all of it: else blocks could be evicted before those behind them."""
        run = place[0]
        blocks = run.blocks
        return run.grows and place[1] == len(blocks) and blocks[-1] == held and len(run.tokens) < _MOST_GROWN

    def needs_all(self, place: Place | None, digest: bytes) -> bool:
        """May what comes behind ``place``, with a block of this hash, be there already?"""
        return digest in self.by_hash or (place is not None and place[1] < len(place[0].blocks))

    def _place_in(self, run: Run, blocks: list[int]) -> None:
        found_in = self._pool.found_in
        for block in blocks:
            if found_in[block] is not None:
                raise RuntimeError(f"block {block} is already findable")
            found_in[block] = run
        self.blocks += len(blocks)

    def close(self) -> None:
        """Its pool is used no more: they let go of each other (garbage.py)."""
        self._pool.on_evict = nothing_to_forget

    def flush(self) -> int:
        """Nothing is found any more. Returns how many blocks could be; those that sequences hold stay theirs."""
        count = self.blocks
        for run in list(self.by_hash.values()):
            self._drop(run)
        return count

    def _walk(self, parts: list[Place], at: int, hashes: list[bytes], tokens: bytes, salt: str, most: int) -> int:
        """Let ``parts`` go on from block ``at`` of ``hashes`` and ``tokens`` while what follows can be found. Returns
        the block that it came to."""
        width = self._width
        place = parts[-1] if parts else None
        if place is not None and at < most and place[1] < len(place[0].blocks):
            same = place[0].common(place[1], tokens, at * width, most - at, width)
            if same:
                place = parts[-1] = (place[0], place[1] + same)
                at += same
        while at < most:
            run = self.by_hash.get(hashes[at])
            if run is None or not run.follows(place, salt):
                break
            same = run.common(0, tokens, at * width, most - at, width)
            if same == 0:
                break
            place = (run, same)
            parts.append(place)
            at += same
        return at

    def _evicted(self, blocks: list[int]) -> None:
        """The pool took these, neighbours in the order in which a sequence held them."""
        found_in, end = self._pool.found_in, len(blocks)
        while end:
            run = found_in[blocks[end - 1]]
            assert isinstance(run, Run)
            have, count = run.blocks, 0
            if blocks == have:
                count = end  # a whole run, as most are
            else:
                while count < min(end, len(have)) and blocks[end - 1 - count] == have[-1 - count]:
                    count += 1
            if count == 0:
                raise RuntimeError(f"block {blocks[end - 1]} was evicted before those behind it")
            for i in range(end - count, end):
                found_in[blocks[i]] = None
            if count == len(have):
                run.blocks, run.tokens, run.grows = [], b"", False
                del self.by_hash[run.digest]
            else:
                _lose(run, count, self._width)
            end -= count
        self.blocks -= len(blocks)
        self.dropped += len(blocks)

    def _drop(self, run: Run) -> None:
        """None of its blocks is found any more."""
        blocks, run.blocks, run.grows = run.blocks, [], False
        for block in blocks:
            self._pool.found_in[block] = None
        self._pool.forget(blocks)
        del self.by_hash[run.digest]
        self.blocks -= len(blocks)
        self.dropped += len(blocks)


def _lose(run: Run, count: int, width: int) -> None:
    """Its last blocks were evicted, not all. Their tokens go when they are more than half of all: each is copied once
    or so, and a first block that is used for ever does not keep a long prompt."""
    del run.blocks[-count:]
    run.grows = False
    left = len(run.blocks) * width
    if len(run.tokens) > 2 * left:
        run.tokens = run.tokens[:left]
