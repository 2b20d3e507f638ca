"""Token ids to text, a few at a time.

What is released after k tokens is a pure function of those k tokens (and of ``starts_text``), however they were cut
into calls; the releases and the final ``flush`` concatenate to the decode of all of them. Every release is valid UTF-8:
bytes that do not yet make a character are held back, and at the end become U+FFFD. Cost: O(new tokens).

One difference from the ``tokenizers`` library, for SentencePiece vocabularies only: it turns *every* byte of a run of
byte pieces into U+FFFD when any part of the run is not UTF-8, which is known only when the run ends. Here the
characters that were complete before the broken byte stay, as they have been sent.
"""

from __future__ import annotations

import codecs

from scheduler_svc.api.text.pieces import BYTE_LEVEL, PieceTable

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one choice. ``starts_text``: the output is a text of its own (a chat answer), so that the space that
    SentencePiece puts before a text's first word goes; else it goes on from the prompt's text, and the space stays.
    ``keep_special``: special tokens are written out; else they have no text."""

    __slots__ = ("_bare", "_broken", "_keep_special", "_pending", "_strip", "_table")

    def __init__(self, table: PieceTable, starts_text: bool = True, keep_special: bool = False) -> None:
        self._table = table
        self._keep_special = keep_special
        self._pending = b""  # the start of a character
        self._broken = False  # pieces: this run of bytes is not UTF-8
        self._strip = table.plan.strip if starts_text else 0
        self._bare = bool(table.plan.bare_first) and starts_text

    def push(self, tokens: list[int]) -> str:
        """The text that these tokens, the next ones, release."""
        if self._table.plan.family == BYTE_LEVEL:
            data = self._table.joined(tokens, self._keep_special)
            if self._pending:
                data = self._pending + data
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            return text
        return self._stripped("".join([self._push_piece(token) for token in tokens]))

    def flush(self) -> str:
        """The text held back, at the end of the output."""
        pending, self._pending = self._pending, b""
        if self._table.plan.family == BYTE_LEVEL:
            return codecs.utf_8_decode(pending, "replace", True)[0]
        return self._stripped(REPLACEMENT * len(pending))

    def state(self) -> tuple[bytes, bool, int, bool]:
        """What ``restore`` needs to take back every push since."""
        return self._pending, self._broken, self._strip, self._bare

    def restore(self, state: tuple[bytes, bool, int, bool]) -> None:
        self._pending, self._broken, self._strip, self._bare = state

    def _push_piece(self, token: int) -> str:
        piece = self._table[token]
        if (piece.special and not self._keep_special) or not (piece.data or piece.bare is not None):
            return ""
        if piece.raw:
            self._bare = False
            if self._broken:
                return REPLACEMENT
            data = self._pending + piece.data
            try:
                text, used = codecs.utf_8_decode(data, "strict", False)
            except UnicodeDecodeError:
                self._pending, self._broken = b"", True
                return REPLACEMENT * len(data)
            self._pending = data[used:]
            return text
        held = REPLACEMENT * len(self._pending)
        self._pending, self._broken = b"", False
        data = piece.data
        if self._bare:
            self._bare = False
            if piece.bare is not None:
                data = piece.bare
        return held + data.decode()

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            char = self._table.plan.strip_char
            while self._strip and text.startswith(char):
                text, self._strip = text[len(char) :], self._strip - 1
            if text:
                self._strip = 0
        return text
