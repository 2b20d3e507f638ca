"""The waiting sequences of one model, in the order in which they are to be admitted.

The key is static although priorities age: a class is worth ``ageing`` seconds of arrival time, so comparing
``arrival + priority * ageing`` is comparing aged priorities at any moment. It also states the bound on being passed
over: a request of class p is overtaken only by requests that arrive within ``(p + 100) * ageing`` seconds after it.
Continuations go before new work.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator

from scheduler_svc.core.sequence import Sequence, State


class WaitingQueue:
    def __init__(self, ageing: float) -> None:
        self._ageing = ageing
        self._entries: list[tuple[tuple[int, float, int], Sequence]] = []
        self.tokens: Counter[str] = Counter()  # by tenant: known tokens of its sequences here

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot in order: entries may be removed while it runs."""
        for _, sequence in self._entries.copy():
            yield sequence

    def key(self, sequence: Sequence) -> tuple[int, float, int]:
        return (0 if sequence.continued else 1, sequence.arrival + sequence.priority * self._ageing, sequence.order)

    def push(self, sequence: Sequence, now: float) -> None:
        sequence.state = State.WAITING
        sequence.wait_key = self.key(sequence)
        sequence.enqueued = now
        sequence.unroutable_since = 0.0
        sequence.prefix_wait_until = 0.0
        sequence.waits_for = "its turn"
        sequence.queued_tokens = sequence.known
        self.tokens[sequence.salt] += sequence.known
        bisect.insort(self._entries, (sequence.wait_key, sequence), key=_key)

    def remove(self, sequence: Sequence) -> None:
        at = bisect.bisect_left(self._entries, sequence.wait_key, key=_key)
        if at == len(self._entries) or self._entries[at][1] is not sequence:
            raise RuntimeError("the sequence is not in this queue")
        del self._entries[at]
        left = self.tokens[sequence.salt] - sequence.queued_tokens
        if left:
            self.tokens[sequence.salt] = left
        else:
            del self.tokens[sequence.salt]

    def ahead_of(self, sequence: Sequence) -> int:
        """How many come before it."""
        return bisect.bisect_left(self._entries, sequence.wait_key, key=_key)


def _key(entry: tuple[tuple[int, float, int], Sequence]) -> tuple[int, float, int]:
    return entry[0]
