"""Which full blocks of one executor can be found again, and under what content.

An entry is trusted for its content, never for its hash: a hit compares the tokens, and compares the parent by the
parent entry's identity (``uid``), which stands for the whole chain before it. The first entry of a chain compares the
tenant's salt. A block becomes findable only when the plan that filled it was answered (commit.py).
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import cast

import msgspec
import numpy as np

from scheduler_svc.core.blocks import BlockPool, nothing_to_forget


class Entry(msgspec.Struct, eq=False, gc=False):
    """Made by the thousand, so it is a struct that Python's cycle collector never looks at."""

    uid: int
    hash: bytes
    parent: int  # uid of the entry before; 0: this is a first block
    salt: str
    tokens: bytes
    block: int
    live: bool = True

    def holds(self, parent: int, salt: str, tokens: bytes) -> bool:
        return self.parent == parent and self.tokens == tokens and self.salt == salt


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.by_hash: dict[bytes, Entry] = {}
        self.by_block: dict[int, Entry] = {}
        self.hits = 0  # blocks
        self.lookups = 0  # blocks looked for
        self.dropped = 0  # entries, ever: what was found while this stands still is there
        self._pool = pool
        self._width = 4 * block_size
        self._content = np.dtype(f"V{self._width}")
        self._next_uid = 1
        pool.in_cache = self.by_block
        pool.on_evict = self._evicted

    def extend(self, found: list[Entry], hashes: list[bytes], tokens: bytes, salt: str, most: int) -> None:
        """Let ``found``, a findable prefix, go on as far as it does, up to ``most`` entries. ``tokens``: raw int32 from
        the start."""
        start, width = len(found), self._width
        parent = found[-1].uid if found else 0
        known = list(map(self.by_hash.get, hashes[start:most]))
        there = known[: known.index(None)] if None in known else known
        entries = cast("list[Entry]", there)
        content = tokens[start * width : (start + len(entries)) * width]
        # As a whole first: a long prompt has thousands of blocks.
        parents = [parent, *[entry.uid for entry in entries]]
        parents.pop()
        if (
            [entry.parent for entry in entries] == parents
            and b"".join([entry.tokens for entry in entries]) == content
            and all(entry.salt == salt for entry in entries[:1])  # those that follow are bound to it
        ):
            found += entries
            return
        for i, entry in enumerate(entries):
            if not entry.holds(parent, salt, content[i * width : (i + 1) * width]):
                return
            found.append(entry)
            parent = entry.uid

    def register(
        self, digests: list[bytes], parent: Entry | None, salt: str, tokens: bytes, blocks: list[int]
    ) -> Entry | None:
        """``blocks`` now hold ``tokens``, a block's each, one after the other and all after ``parent``. Returns the
        entry of the last content: where one was there before it stays (and its block the one that is found)."""
        by_hash, by_block = self.by_hash, self.by_block
        parent_uid = parent.uid if parent is not None else 0
        contents: list[bytes] = np.frombuffer(tokens, dtype=self._content).tolist()
        count = len(contents)
        if not len(digests) == len(blocks) == count:
            raise ValueError(f"{len(digests)} hashes and {len(blocks)} blocks for {count} blocks of tokens")
        new = by_hash.keys().isdisjoint(digests) and by_block.keys().isdisjoint(blocks)
        if new and len(set(digests)) == count:  # nothing to compare with: all of them at once
            first = self._next_uid
            self._next_uid += count
            uids = range(first, first + count)
            entries = list(map(Entry, uids, digests, chain((parent_uid,), uids), repeat(salt), contents, blocks))
            by_hash.update(zip(digests, entries, strict=True))
            by_block.update(zip(blocks, entries, strict=True))
            return entries[-1] if entries else parent
        for digest, block, content in zip(digests, blocks, contents, strict=True):
            entry = by_hash.get(digest)
            if entry is not None and not entry.holds(parent_uid, salt, content):
                # Another chain under this hash, or one whose parent is gone: cannot be reached by us.
                self._drop(entry)
                self._pool.forget(entry.block)
                entry = None
            if entry is None:
                if block in by_block:
                    raise RuntimeError(f"block {block} is already findable")
                entry = Entry(self._next_uid, digest, parent_uid, salt, content, block)
                self._next_uid += 1
                by_hash[digest] = entry
                by_block[block] = entry
            parent, parent_uid = entry, entry.uid
        return parent

    def close(self) -> None:
        """Its pool is used no more: they let go of each other (garbage.py)."""
        self._pool.on_evict = nothing_to_forget

    def flush(self) -> int:
        """Nothing is found any more. Returns how many blocks could be; those that sequences hold stay theirs."""
        entries = list(self.by_block.values())
        for entry in entries:
            self._drop(entry)
            self._pool.forget(entry.block)
        return len(entries)

    def _evicted(self, blocks: list[int]) -> None:
        by_hash, by_block = self.by_hash, self.by_block
        for block in blocks:
            entry = by_block.pop(block)
            entry.live = False
            del by_hash[entry.hash]
        self.dropped += len(blocks)

    def _drop(self, entry: Entry) -> None:
        entry.live = False
        del self.by_hash[entry.hash]
        del self.by_block[entry.block]
        self.dropped += 1
