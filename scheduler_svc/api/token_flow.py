"""From the core's tokens to the writers of the streams, and the credit that goes back: the order of a worker's work.

Taking tokens in costs little, and is done as they come (token_batch.py). Looking for stop strings and making messages
costs much, and is done for a few streams at a time, with everybody else's turn in between: first the streams that have
shown no token yet, then the others, the longest waiting first. The more there is to do, the more of a stream's tokens
ride in one message, and what a new stream waits for stays the same.

The core may have ``allowance`` tokens on their way that were not looked at: some steps' worth for each choice, so that
a worker that keeps up is never short of them, and one that does not has little queued before a new stream's first
token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import islice

import numpy as np

from protos import front
from protos.wire import pack_int32
from scheduler_svc.api.stream import Stream
from scheduler_svc.api.token_batch import guarded

_A_CHOICE, _LEAST = 32, 128  # tokens of allowance
_ROUND = 8  # streams served before others have their turn


class TokenFlow:
    """``send`` speaks to the core; ``window`` as attached with; ``numbers``: of the submissions, 0 for a stream that
    the core is done with."""

    def __init__(self, window: int, send: Callable[[front.ToCore], None], numbers: Mapping[Stream, int]) -> None:
        self.received = 0  # tokens, since Attach
        self.choices = 0  # submitted, and not ended by the core
        self._window = window
        self._send = send
        self._numbers = numbers
        self._looked = 0  # of those received, or nobody's any more
        self._credited = 0
        self._allowance = window  # as the core knows it
        self._fresh: dict[Stream, None] = {}  # have news, and have shown no token yet
        self._due: dict[Stream, None] = {}  # the others with news; both in order of waiting

    def __bool__(self) -> bool:
        """Is there something to serve?"""
        return bool(self._fresh or self._due)

    def restart(self) -> None:
        """A new session counts from nothing; what came in the last one is to be looked at before."""
        assert not self
        self.received = self.choices = self._looked = self._credited = 0
        self._allowance = self._window

    def came(self, tokens: int, unclaimed: int) -> None:
        """So many tokens came, of which some are of streams that are gone."""
        self.received += tokens
        self._looked += unclaimed

    def touch(self, stream: Stream) -> None:
        """There is news for this stream."""
        if stream.fresh:
            self._fresh.setdefault(stream)
        else:
            self._due.setdefault(stream)

    async def serve(self, turn: float) -> None:
        """As many streams as ``turn`` allows (seconds of processor time: whoever has the processor meanwhile takes none
        of it), but some in any case; and the credit for that."""
        until = time.thread_time() + turn
        seen: list[tuple[int, int, int]] = []
        try:
            while True:
                self._serve_some(_ROUND, seen)
                if not self or time.thread_time() >= until:
                    break
                await asyncio.sleep(0)  # the writers, and new calls
        finally:
            self._tell(seen)

    def serve_all(self) -> None:
        """At a session's end: the core hears nothing of it."""
        self._serve_some(len(self._fresh) + len(self._due), [])

    def _serve_some(self, count: int, seen: list[tuple[int, int, int]]) -> None:
        for waiting in (self._fresh, self._due):
            for stream in list(islice(waiting, count)):
                count -= 1
                del waiting[stream]
                self._looked += stream.unlooked
                stream.unlooked = 0
                number = self._numbers.get(stream, 0)
                if number:
                    for stop in guarded(stream, stream.look, number, seen) or ():
                        self._send(stop)
                stream.wake()

    def _tell(self, seen: list[tuple[int, int, int]]) -> None:
        if seen:
            table = np.asarray(seen, dtype=np.int32).T
            self._send(front.Seen(pack_int32(table[0]), pack_int32(table[1]), pack_int32(table[2])))
        self.credit()

    def credit(self) -> None:
        """Tells the core how far this worker is, where that is news."""
        allowance = min(self._window, max(_LEAST, _A_CHOICE * self.choices))
        other = allowance >= 2 * self._allowance or self._allowance >= 2 * allowance
        if other or self._looked - self._credited >= max(1, allowance // 16):
            self._credited, self._allowance = self._looked, allowance
            self._send(front.Credit(self._looked, allowance))
