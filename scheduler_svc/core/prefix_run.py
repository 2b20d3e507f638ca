"""Blocks of one executor that one sequence filled one after the other, and places behind them (prefix_cache.py)."""

from __future__ import annotations

import msgspec
import numpy as np


class Run(msgspec.Struct, eq=False, gc=False):
    """Python's cycle collector never looks at these (garbage.py)."""

    uid: int
    digest: bytes  # of its first block
    parent: int  # uid of the run that it follows; 0: it starts a chain
    after: int  # how many blocks of that one come before it
    salt: str
    tokens: bytes  # raw int32; at its end, those of some evicted blocks
    blocks: list[int]
    grows: bool = True  # it has lost no block, and nothing follows its last one

    def follows(self, place: Place | None, salt: str) -> bool:
        if place is None:
            return self.parent == 0 and self.salt == salt
        return self.parent == place[0].uid and self.after == place[1]

    def common(self, start: int, tokens: bytes, at: int, most: int, width: int) -> int:
        """How many of its blocks from ``start`` on hold ``tokens`` from byte ``at`` on; at most ``most``."""
        most = min(most, len(self.blocks) - start)
        if most <= 0 or self.tokens[start * width : (start + 1) * width] != tokens[at : at + width]:
            return 0  # as most who look again: no need to go through long prompts
        mine = self.tokens[start * width : (start + most) * width]
        theirs = tokens[at : at + most * width]
        if mine == theirs:
            return most
        differs = np.frombuffer(mine, dtype="<i4") != np.frombuffer(theirs, dtype="<i4")
        return int(differs.argmax()) * 4 // width


Place = tuple[Run, int]  # behind so many blocks of a run


def is_there(place: Place) -> bool:
    """Can the block before this place still be found?"""
    return place[1] <= len(place[0].blocks)
