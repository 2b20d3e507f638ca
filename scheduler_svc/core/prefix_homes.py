"""Which executors of a model may hold a prefix, by the hash of its first block.

Hints for placement in a fleet that is too large to ask each executor: they are added at admissions, checked where they
are used, and forgotten when too many others came since. In a small fleet everyone is asked, and nothing is kept.
"""

from __future__ import annotations

from collections import OrderedDict

_MOST_PREFIXES = 65536
_MOST_HOMES = 8  # of one prefix: the newest


class PrefixHomes:
    def __init__(self) -> None:
        # Least recently added to first. (The first of a plain dict is searched for among all that left it before.)
        self._sessions: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def add(self, digest: bytes, session: bytes) -> None:
        homes = self._sessions.pop(digest, None)
        if homes is None:
            homes = []
            if len(self._sessions) >= _MOST_PREFIXES:
                self._sessions.popitem(last=False)
        elif session in homes:
            homes.remove(session)
        homes.append(session)
        if len(homes) > _MOST_HOMES:
            del homes[0]
        self._sessions[digest] = homes

    def of(self, digest: bytes) -> list[bytes]:
        """Sessions, the newest last; some may be gone, or hold it no more."""
        return self._sessions.get(digest, [])
