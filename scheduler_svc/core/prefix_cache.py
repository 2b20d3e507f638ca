"""Which full blocks of one executor can be found again, and under what content.

An entry is trusted for its content, never for its hash: a hit compares the tokens, and compares the parent by the
parent entry's identity (``uid``), which stands for the whole chain before it. The first entry of a chain compares the
tenant's salt. A block becomes findable only when the plan that filled it was answered (commit.py).
"""

from __future__ import annotations

from itertools import count

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.prefix_hash import HASH_BYTES


class Entry:
    __slots__ = ("block", "hash", "live", "parent", "salt", "tokens", "uid")

    def __init__(self, uid: int, digest: bytes, parent: int, salt: str, tokens: bytes, block: int) -> None:
        self.uid = uid
        self.hash = digest
        self.parent = parent  # uid of the entry before; 0: this is a first block
        self.salt = salt
        self.tokens = tokens
        self.block = block
        self.live = True

    def holds(self, parent: int, salt: str, tokens: bytes) -> bool:
        return self.parent == parent and self.tokens == tokens and self.salt == salt


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.by_hash: dict[bytes, Entry] = {}
        self.by_block: dict[int, Entry] = {}
        self.hits = 0  # blocks
        self.lookups = 0  # blocks looked for
        self._pool = pool
        self._width = 4 * block_size
        self._uids = count(1)
        pool.on_evict = self._evicted

    def lookup(self, hashes: bytes | bytearray, tokens: bytes | bytearray, salt: str, max_blocks: int) -> list[Entry]:
        """The longest findable prefix, at most ``max_blocks`` entries. ``tokens`` are raw int32 from the start."""
        found: list[Entry] = []
        parent = 0
        width = self._width
        for i in range(min(max_blocks, len(hashes) // HASH_BYTES)):
            entry = self.by_hash.get(bytes(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]))
            if entry is None or not entry.holds(parent, salt, bytes(tokens[i * width : (i + 1) * width])):
                break
            found.append(entry)
            parent = entry.uid
        return found

    def register(self, digest: bytes, parent: Entry | None, salt: str, tokens: bytes, block: int) -> Entry:
        """``block`` now holds ``tokens`` after ``parent``. Returns the entry of that content: the one there before,
        if there was one (its block stays the one that is found)."""
        parent_uid = parent.uid if parent is not None else 0
        old = self.by_hash.get(digest)
        if old is not None:
            if old.holds(parent_uid, salt, tokens):
                return old
            self._drop(old)  # another chain under this hash, or one whose parent is gone: cannot be reached by us
            self._pool.forget(old.block)
        here = self.by_block.get(block)
        if here is not None:
            raise RuntimeError(f"block {block} is already findable")
        entry = Entry(next(self._uids), digest, parent_uid, salt, tokens, block)
        self.by_hash[digest] = entry
        self.by_block[block] = entry
        self._pool.findable[block] = True
        return entry

    def flush(self) -> int:
        """Nothing is found any more. Returns how many blocks could be; those that sequences hold stay theirs."""
        entries = list(self.by_block.values())
        for entry in entries:
            self._drop(entry)
            self._pool.forget(entry.block)
        return len(entries)

    def _evicted(self, block: int) -> None:
        self._drop(self.by_block[block])

    def _drop(self, entry: Entry) -> None:
        entry.live = False
        del self.by_hash[entry.hash]
        del self.by_block[entry.block]
