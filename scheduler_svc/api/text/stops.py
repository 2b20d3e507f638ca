"""Stop strings: found in the released text wherever they begin and however many tokens they span.

An automaton (Aho-Corasick) reads the text a character at a time. Its state is the longest end of the text that is the
beginning of some stop string: just that many characters are held back, so a match is always cut before anything of it
was sent. Of several matches the one that ends first counts, and among those that end together the longest. The decision
is made token by token, so it does not depend on how the tokens arrived.

Special tokens are no part of the text, but a stop string that contains a special token's own text (``<|im_end|>``) is
also looked for in the text *with* special tokens written out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


class _Automaton:
    """States are numbers; ``depth[s]`` is the length of the beginning that s stands for, ``found[s]`` the longest stop
    string that ends there, or None."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            state = 0
            for char in stop:
                following = self.next[state].get(char)
                if following is None:
                    following = len(self.next)
                    self.next[state][char] = following
                    self.next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.found.append(None)
                state = following
            self.found[state] = stop
        self.fail = [0] * len(self.next)
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.next[state].items():
                self.fail[following] = self.step(self.fail[state], char)
                if self.found[following] is None:
                    self.found[following] = self.found[self.fail[following]]
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        while True:
            following = self.next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


@dataclass(frozen=True, slots=True)
class StopMatch:
    stop: str
    text: str  # the text still to be released: what was held back, up to the match
    matched: str  # the part of the match that is text (not of special tokens): it follows ``text``


class StopStrings:
    """The stop strings of a request, compiled once for all its choices."""

    def __init__(self, stops: Iterable[str], special_texts: Iterable[str] = ()) -> None:
        stops = tuple(stops)
        specials = tuple(text for text in special_texts if text)
        with_special = [stop for stop in stops if any(text in stop for text in specials)]
        self.plain = _Automaton(stops)
        self.spelled = _Automaton(with_special) if with_special else None
        self.longest = max(map(len, stops), default=0)


class StopMatcher:
    """The state of one choice."""

    __slots__ = ("_held", "_plain", "_spelled", "_stops", "_visible")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""
        self._plain = 0
        self._spelled = 0
        # Which of the last characters of the spelled-out text are text: only they are ever held back.
        self._visible: deque[bool] = deque(maxlen=stops.longest)

    def push(self, text: str, armed: bool = True) -> str | StopMatch:
        """The text that can be released now that ``text`` follows, or the match. Not ``armed``: a stop string that is
        completed here does not count."""
        automaton, state = self._stops.plain, self._plain
        for position, char in enumerate(text, 1):
            state = automaton.step(state, char)
            found = automaton.found[state]
            spelled = self._spell(char, True) if self._stops.spelled is not None else None
            if armed and (found is not None or spelled is not None):
                whole = self._held + text[:position]
                plain_cut = len(found) if found is not None else 0
                spelled_cut = self._shown(len(spelled)) if spelled is not None else 0
                # Both end here: the one that begins first.
                stop = found if spelled is None or (found is not None and plain_cut >= spelled_cut) else spelled
                assert stop is not None
                cut = len(whole) - max(plain_cut, spelled_cut)
                return StopMatch(stop, whole[:cut], whole[cut:])
        self._plain = state
        return self._release(text)

    def push_special(self, text: str, armed: bool = True) -> str | StopMatch:
        """A special token, whose own text is ``text``, follows. As for ``push``."""
        if self._stops.spelled is None:
            return ""
        for char in text:
            found = self._spell(char, False)
            if armed and found is not None:
                cut = len(self._held) - self._shown(len(found))
                return StopMatch(found, self._held[:cut], self._held[cut:])
        return self._release("")

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def state(self) -> tuple[str, int, int, tuple[bool, ...]]:
        return self._held, self._plain, self._spelled, tuple(self._visible)

    def restore(self, state: tuple[str, int, int, tuple[bool, ...]]) -> None:
        self._held, self._plain, self._spelled = state[:3]
        self._visible.clear()
        self._visible.extend(state[3])

    def _spell(self, char: str, visible: bool) -> str | None:
        automaton = self._stops.spelled
        assert automaton is not None
        self._spelled = automaton.step(self._spelled, char)
        self._visible.append(visible)
        return automaton.found[self._spelled]

    def _shown(self, count: int) -> int:
        """Of the last ``count`` characters of the spelled-out text, how many are text."""
        return sum(list(self._visible)[-count:]) if count else 0

    def _release(self, text: str) -> str:
        whole = self._held + text
        keep = self._stops.plain.depth[self._plain]
        if self._stops.spelled is not None and self._spelled:
            keep = max(keep, self._shown(self._stops.spelled.depth[self._spelled]))
        cut = len(whole) - keep
        self._held = whole[cut:]
        return whole[:cut]
