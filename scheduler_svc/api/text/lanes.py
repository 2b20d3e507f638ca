"""Threads for texts that take long to encode, so that no text waits for much longer ones.

A thread for giants apart: two texts of megabytes, seconds each, would otherwise hold up every prompt of a page.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor

GIANT_TEXT = 64 * 1024  # characters: some tens of milliseconds


class Lanes:
    def __init__(self) -> None:
        self._most = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._giants = ThreadPoolExecutor(1, thread_name_prefix="giant-text")

    def of(self, characters: int) -> Executor:
        """Where a text of this length is to be encoded."""
        return self._giants if characters > GIANT_TEXT else self._most

    def close(self) -> None:
        """Nothing more begins; what runs is not waited for."""
        for pool in (self._most, self._giants):
            pool.shutdown(wait=False, cancel_futures=True)
