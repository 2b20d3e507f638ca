"""The waiting sequences of one model, in the order in which they are to be admitted.

The key is static although priorities age: a class is worth ``ageing`` seconds of arrival time, so comparing
``arrival + priority * ageing`` is comparing aged priorities at any moment. A deadline less than ``ageing`` away at
arrival is worth the difference. Tenants that are ahead of others in service stand back by up to ``fair_window``
(fairness.py). Continuations go before new work.

So being passed over has a bound: a new request of class p is overtaken only by continuations, and by requests that
arrive within ``(p + 101) * ageing + fair_window`` seconds after it.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from operator import itemgetter

from scheduler_svc.core.fairness import FairShares
from scheduler_svc.core.sequence import Sequence, State

_Key = tuple[int, float, int]
Entry = tuple[_Key, Sequence]

_CHUNK = 256


class WaitingQueue:
    def __init__(self, ageing: float, shares: FairShares | None = None) -> None:
        self._ageing = ageing
        self.shares = shares or FairShares(0.0, 0)
        self._lines: dict[str, list[Entry]] = {}  # by tenant, each in order of its keys; no empty ones
        self._length = 0
        self._pushed = 0  # ever
        self.tokens: dict[str, int] = {}  # by tenant, no zeros: known tokens of its sequences here

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait now, in order: they may be removed while it runs, and service that is charged meanwhile
        counts. Who is put back meanwhile is not met."""
        if len(self._lines) > 1:
            return self._by_shares(self._pushed)
        return map(_sequence, _in_chunks(next(iter(self._lines.values()), []), self._pushed))

    def _by_shares(self, newest: int) -> Iterator[Sequence]:
        floor = self.shares.floor
        lines, rest = self._lines.copy(), dict[str, Iterator[Entry]]()
        heads = [  # (effective key, tenant, its first, that one's own key)
            (self._effective(line[0][0], tenant, floor), tenant, line[0][1], line[0][0])
            for tenant, line in lines.items()
        ]
        heapq.heapify(heads)
        while heads:
            key, tenant, sequence, own = heads[0]
            now = self._effective(own, tenant, floor)
            if now > key:  # served since it was put there
                heapq.heapreplace(heads, (now, tenant, sequence, own))
                continue
            heapq.heappop(heads)
            yield sequence
            if tenant not in rest:
                rest[tenant] = _in_chunks(lines[tenant], newest, behind=own)
            entry = next(rest[tenant], None)
            if entry is not None:
                heapq.heappush(heads, (self._effective(entry[0], tenant, floor), tenant, entry[1], entry[0]))

    def lines(self) -> list[list[Entry]]:
        """Copies, one a tenant, each in order."""
        return [line.copy() for line in self._lines.values()]

    def unordered(self) -> Iterator[Sequence]:
        """Every one, in no order that matters; nothing may be removed while it runs."""
        return (sequence for line in self._lines.values() for _, sequence in line)

    def key(self, sequence: Sequence) -> _Key:
        time = sequence.arrival + sequence.priority * self._ageing
        deadline = sequence.stream.deadline
        if deadline > 0.0:
            time -= min(self._ageing, max(0.0, self._ageing - (deadline - sequence.arrival)))
        return (0 if sequence.continued else 1, time, sequence.order)

    def push(self, sequence: Sequence, now: float) -> None:
        sequence.state = State.WAITING
        sequence.wait_key = self.key(sequence)
        sequence.enqueued = now
        sequence.unroutable_since = 0.0
        sequence.prefix_wait_until = 0.0
        sequence.left_since = 0.0
        sequence.waits_for = "its turn"
        tenant = sequence.salt
        self._pushed += 1
        sequence.ticket = self._pushed
        sequence.queued_tokens = known = sequence.known
        self.tokens[tenant] = self.tokens.get(tenant, 0) + known
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = []
            self.shares.waits(tenant)
        if not line or line[-1][0] < sequence.wait_key:
            line.append((sequence.wait_key, sequence))
        else:
            bisect.insort(line, (sequence.wait_key, sequence), key=_key)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.salt
        line = self._lines.get(tenant, [])
        first = bool(line) and line[0][1] is sequence
        at = 0 if first else bisect.bisect_left(line, sequence.wait_key, key=_key)
        if at == len(line) or line[at][1] is not sequence:
            raise RuntimeError("the sequence is not in this queue")
        del line[at]
        self._length -= 1
        if not line:
            del self._lines[tenant]
            self.shares.waits_no_more(tenant)
        left = self.tokens[tenant] - sequence.queued_tokens
        if left:
            self.tokens[tenant] = left
        else:
            del self.tokens[tenant]

    def ahead_of(self, sequence: Sequence) -> int:
        """How many come before it, as shares stand now."""
        floor = self.shares.floor
        key = self._effective(sequence.wait_key, sequence.salt, floor)
        ahead = 0
        for tenant, line in self._lines.items():
            back = self.shares.put_back(tenant, floor)
            theirs = (key[0], key[1] - back if key[0] else key[1], key[2])
            ahead += bisect.bisect_left(line, sequence.wait_key if tenant == sequence.salt else theirs, key=_key)
        return ahead

    def _effective(self, key: _Key, tenant: str, floor: float) -> _Key:
        return (key[0], key[1] + self.shares.put_back(tenant, floor), key[2]) if key[0] else key


def _in_chunks(line: list[Entry], newest: int, behind: _Key | None = None) -> Iterator[Entry]:
    """The entries of a line up to this ticket, some copied at a time: a plan looks at the first few of very many."""
    start = 0 if behind is None else bisect.bisect_right(line, behind, key=_key)
    while chunk := line[start : start + _CHUNK]:
        for entry in chunk:
            if entry[1].ticket <= newest:
                yield entry
        start = bisect.bisect_right(line, chunk[-1][0], key=_key)


def _key(entry: Entry) -> _Key:
    return entry[0]


_sequence = itemgetter(1)
