"""Where work that takes long is done, so that neither streams nor other texts wait for it.

Encoding is the library's, which releases the interpreter's lock: it goes to a thread. A thread for giants apart: two
texts of megabytes, seconds each, would otherwise hold up every prompt of a page. Our own code holds the lock wherever
it runs: what grows with a request is done on the event loop, some at a time, with everybody else's turn in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor

GIANT_TEXT = 64 * 1024  # characters: some tens of milliseconds
IDS = 16384  # ids that are checked or copied in one turn: about a millisecond
DEAR_IDS = 512  # ids that are looked through for stop strings, or log probabilities, in one turn: the same


class Lanes:
    def __init__(self) -> None:
        self._most = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._giants = ThreadPoolExecutor(1, thread_name_prefix="giant-text")
        self._turn = asyncio.Lock()

    def of(self, characters: int) -> Executor:
        """Where a text of this length is to be encoded."""
        return self._giants if characters > GIANT_TEXT else self._most

    async def turns(self, count: int, each: int = IDS) -> AsyncIterator[slice]:
        """``count`` items as slices of ``each``. However many are at such work, one slice is done before others have
        their turn; what is a fraction of one is done at once."""
        for start in range(0, count, each):
            if count > each // 4:
                async with self._turn:
                    await asyncio.sleep(0)
            yield slice(start, min(start + each, count))

    def close(self) -> None:
        """Nothing more begins; what runs is not waited for."""
        for pool in (self._most, self._giants):
            pool.shutdown(wait=False, cancel_futures=True)
