"""The output of one choice, token by token: its ids, the text they release, and where it ends.

Everything here is a pure function of the tokens and the request, never of time or of how the tokens arrived; so a
choice continued from its first k ids goes on with the very byte at which the former stream broke off.

Ends, in the order in which they win at one token: a stop string completed by it, EOS, a stop id, the limit. The text of
an EOS token or stop id is no part of the text, unless ``include_stop``; the id is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from protos.front import LENGTH, STOP_EOS, STOP_ID, STOP_TEXT
from scheduler_svc.api.text.detokenizer import Detokenizer
from scheduler_svc.api.text.stops import StopMatch, StopMatcher, StopStrings


@dataclass(frozen=True, slots=True)
class End:
    """Why a choice ended: a reason of protos.front, and what matched."""

    reason: int
    token: int = -1
    stop: str = ""


class Output:
    """``special_text`` names the text of a special token that the text leaves out ("" for others); without a
    detokenizer there is no text. Within the first ``min_tokens`` ids less one no stop string counts."""

    __slots__ = (
        "_detokenizer", "_eos", "_include_stop", "_limit", "_matcher", "_min_tokens", "_special_text", "_stop_ids",
        "end", "ids", "text",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        *,
        eos: frozenset[int],
        stop_ids: frozenset[int],
        limit: int,
        stops: StopStrings | None = None,
        special_text: Callable[[int], str] = lambda token: "",
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._eos = eos  # empty where EOS does not end the choice
        self._stop_ids = stop_ids
        self._limit = limit  # outputs, at most; 0: the core knows the end
        self._matcher = StopMatcher(stops) if stops is not None else None
        self._special_text = special_text
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self.ids = array("i")  # not a list: the cycle collector would look at every id of every stream
        self.text: list[str] = []  # released, not yet taken
        self.end: End | None = None

    def push(self, tokens: list[int]) -> int:
        """Takes the next tokens, up to the end; returns how many were taken."""
        if self.end is not None:
            return 0
        if self._matcher is not None:
            return self._push_matching(tokens)
        if self._limit:
            tokens = tokens[: self._limit - len(self.ids)]
        ending = next((i for i, t in enumerate(tokens) if t in self._eos or t in self._stop_ids), -1)
        if ending >= 0:
            tokens = tokens[: ending + 1]
        self.ids.extend(tokens)
        if self._detokenizer is not None:
            leave_out = ending >= 0 and not self._include_stop
            self.text.append(self._detokenizer.push(tokens[:-1] if leave_out else tokens))
        if ending >= 0:
            self._finish_on(tokens[-1])
        elif self._limit and len(self.ids) >= self._limit:
            self.finish(End(LENGTH))
        return len(tokens)

    def finish(self, end: End) -> None:
        """The core says that the choice ended here; releases what was held back. The first end counts."""
        if self.end is None:
            self.end = end
            if self._detokenizer is not None:
                held = self._matcher.flush() if self._matcher is not None else ""
                self.text.append(held + self._detokenizer.flush())

    def take_text(self) -> str:
        """The text released since the last call."""
        text = "".join(self.text)
        self.text.clear()
        return text

    def _finish_on(self, token: int) -> None:
        self.finish(End(STOP_EOS if token in self._eos else STOP_ID, token))

    def _push_matching(self, tokens: list[int]) -> int:
        for taken, token in enumerate(tokens, 1):
            self.ids.append(token)
            ends = token in self._eos or token in self._stop_ids
            before = self._save() if ends and not self._include_stop else None
            released = self._match(token)
            if isinstance(released, StopMatch):
                self.text.append(released.text + released.matched if self._include_stop else released.text)
                self.end = End(STOP_TEXT, stop=released.stop)
                return taken
            if before is not None:
                self._take_back(before)
                self._finish_on(token)
                return taken
            self.text.append(released)
            if ends:
                self._finish_on(token)
                return taken
            if self._limit and len(self.ids) >= self._limit:
                self.finish(End(LENGTH))
                return taken
        return len(tokens)

    def _match(self, token: int) -> str | StopMatch:
        assert self._detokenizer is not None
        assert self._matcher is not None
        armed = len(self.ids) >= self._min_tokens
        special = self._special_text(token)
        if special:
            return self._matcher.push_special(special, armed)
        return self._matcher.push(self._detokenizer.push([token]), armed)

    def _save(self) -> tuple[object, object]:
        assert self._detokenizer is not None
        assert self._matcher is not None
        return self._detokenizer.state(), self._matcher.state()

    def _take_back(self, saved: tuple[object, object]) -> None:
        assert self._detokenizer is not None
        assert self._matcher is not None
        self._detokenizer.restore(saved[0])  # type: ignore[arg-type]
        self._matcher.restore(saved[1])  # type: ignore[arg-type]
