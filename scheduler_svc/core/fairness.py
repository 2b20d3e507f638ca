"""Fair shares between the tenants that wait for one model.

Each tenant has a counter of the tokens it was served (prompt tokens computed, outputs made). A tenant that is ahead of
the least served one that waits is put back in line, by up to ``window`` seconds of arrival time, which it reaches when
it is ``tokens`` ahead::

    put_back = window * min(1, (served - least served of those that wait) / tokens)

So between tenants that both wait for service, whose heads arrived within ``window`` of each other, the difference of
service stays within ``tokens`` and what one admission brings; and no request is put back by more than ``window``,
whatever others do. A tenant that comes back after a pause starts where the least served one is: nothing is saved up by
waiting.
"""

from __future__ import annotations

import heapq

_MAX_IDLE = 4096  # tenants remembered without a waiting sequence


class FairShares:
    def __init__(self, window: float, tokens: int) -> None:
        self._window = window
        self._tokens = max(tokens, 1)
        self._served: dict[str, float] = {}
        self._waiting: set[str] = set()
        # (served, tenant), one of each that waits and of some that waited: what they were served by then, or less. The
        # first is put right when it is asked for, so the least is found without a look at all.
        self._least: list[tuple[float, str]] = []
        self._listed: set[str] = set()  # in `_least`
        self._floor = 0.0  # never falls: what a tenant that was away starts from

    @property
    def floor(self) -> float:
        """What the least served tenant that waits was served."""
        if self._waiting:
            self._floor = max(self._floor, self._least_served())
        return self._floor

    def _least_served(self) -> float:
        least = self._least
        while True:
            served, tenant = least[0]
            if tenant not in self._waiting:
                heapq.heappop(least)
                self._listed.discard(tenant)
            elif served < self._served[tenant]:
                heapq.heapreplace(least, (self._served[tenant], tenant))
            else:
                return served

    def _list_anew(self) -> None:
        self._least = [(self._served[tenant], tenant) for tenant in self._waiting]
        heapq.heapify(self._least)
        self._listed = set(self._waiting)

    def waits(self, tenant: str) -> None:
        """Its first sequence came into the queue."""
        if self._window == 0.0:
            return
        floor = self.floor
        self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        self._waiting.add(tenant)
        if tenant not in self._listed:
            self._listed.add(tenant)
            heapq.heappush(self._least, (self._served[tenant], tenant))
            if len(self._least) > 2 * len(self._waiting) + 64:  # mostly of those that wait no more
                self._list_anew()
        if len(self._served) > _MAX_IDLE + len(self._waiting):
            idle = sorted((t for t in self._served if t not in self._waiting), key=lambda t: (self._served[t], t))
            for name in idle[: len(idle) // 2]:
                del self._served[name]
            self._list_anew()  # one that comes back may start from less

    def waits_no_more(self, tenant: str) -> None:
        """Its last sequence left the queue."""
        if tenant in self._waiting:
            _ = self.floor
            self._waiting.discard(tenant)
            if not self._waiting:
                self._floor = max(self._floor, self._served[tenant])

    def charge(self, tenant: str, tokens: int) -> None:
        if self._window > 0.0:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._floor) + tokens

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, self._floor)

    def put_back(self, tenant: str, floor: float) -> float:
        """Seconds by which this tenant's new work stands back, given the `floor`."""
        if self._window == 0.0:
            return 0.0
        ahead = self.served(tenant) - floor
        return self._window * min(1.0, max(0.0, ahead) / self._tokens)
