"""What each token id stands for, in bytes: read once from the tokenizer's own description of its decoder.

Two families cover the models served here:

* *byte level* (GPT-2, Llama 3, Qwen, SmolLM): the pieces' bytes, concatenated, are UTF-8;
* *pieces* (SentencePiece, Llama 2, Mistral, Gemma): a piece is text, with U+2581 for a space, or, as ``<0xE2>``, one
  byte of a character the vocabulary lacks.

A decoder of any other kind is refused by name: such a model is served with token ids alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer as HfTokenizer

BYTE_LEVEL: Final = "byte_level"
PIECES: Final = "pieces"

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder cannot be run token by token here; the message names it."""


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """How pieces become text. ``replacements`` are applied to every piece in order; ``strip`` of ``strip_char`` are
    removed from the start of a text; with ``bare_first`` the first piece of a text loses its space marks."""

    family: str
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_char: str = " "
    strip: int = 0
    bare_first: str = ""  # a mark (Metaspace): removed from the first piece, a space elsewhere


def plan_of(decoder: dict[str, Any] | None) -> DecoderPlan:
    """The plan for tokenizer.json's ``decoder``. Raises UnsupportedDecoder."""
    if decoder is None:
        raise UnsupportedDecoder("the tokenizer has no decoder")
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [str(step.get("type")) for step in steps]
    if kinds and set(kinds) <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return DecoderPlan(BYTE_LEVEL)
    replacements: list[tuple[str, str]] = []
    fallback, fused, strip, strip_char, bare_first = False, False, 0, " ", ""
    for kind, step in zip(kinds, steps, strict=True):
        if kind == "Replace" and not fused and isinstance(step.get("pattern"), dict) and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step.get("stop", 0) == 0:
            strip, strip_char = int(step.get("start", 0)), str(step["content"])
        elif kind == "Metaspace" and not fused and len(steps) == 1:
            mark = str(step.get("replacement", "▁"))
            replacements.append((mark, " "))
            bare_first = mark if step.get("prepend_scheme", "always") != "never" else ""
        else:
            raise UnsupportedDecoder(f"decoder step {kind!r} in {' + '.join(kinds) or 'an empty sequence'}")
    if not kinds:
        raise UnsupportedDecoder("an empty decoder sequence")
    return DecoderPlan(PIECES, fallback, tuple(replacements), strip_char, strip, bare_first)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: the 188 bytes that print stand for themselves, the rest for U+0100 and up."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(own)]
    return {**{chr(b): b for b in own}, **{chr(256 + i): b for i, b in enumerate(rest)}}


_ALPHABET: Final = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class Piece:
    """One token id. ``data`` is UTF-8, or for ``raw`` one byte of a longer character; ``special`` is the token's own
    text when it is a special token, which the text leaves out unless it is asked for: then as ``data`` says. ``bare``
    is ``data`` for the first piece of a text."""

    data: bytes
    raw: bool = False
    special: str = ""
    bare: bytes | None = None


_NOTHING: Final = Piece(b"")


class PieceTable:
    """id -> Piece, computed on first use and kept."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        spec = json.loads(tokenizer.to_str())
        self.plan = plan_of(spec.get("decoder"))
        self.special = {
            int(token["id"]): str(token["content"]) for token in spec.get("added_tokens", []) if token.get("special")
        }
        self._tokenizer = tokenizer
        self._pieces: dict[int, Piece] = {}
        self._bytes: dict[int, bytes] = {}
        self._spelled: dict[int, bytes] = {}  # the same with special tokens written out

    def __getitem__(self, token: int) -> Piece:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._make(token)
        return piece

    def joined(self, tokens: list[int], keep_special: bool = False) -> bytes:
        """Byte level only: the bytes of many tokens, special ones left out or kept."""
        cache = self._spelled if keep_special else self._bytes
        try:
            return b"".join([cache[token] for token in tokens])
        except KeyError:
            for token in tokens:
                piece = self[token]
                cache[token] = b"" if piece.special and not keep_special else piece.data
            return b"".join([cache[token] for token in tokens])

    def _make(self, token: int) -> Piece:
        special = self.special.get(token, "")
        text = special or self._tokenizer.id_to_token(token)
        if text is None:  # a hole, or padding of the vocabulary: the full decode has nothing for it either
            return _NOTHING
        plan = self.plan
        if plan.family == BYTE_LEVEL:
            values = [_ALPHABET.get(char) for char in text]
            # An added token may hold characters outside the alphabet: it stands for itself.
            data = text.encode() if None in values else bytes(value for value in values if value is not None)
            return Piece(data, special=special)
        original = text
        for old, new in plan.replacements:
            text = text.replace(old, new)
        if plan.byte_fallback and (match := _BYTE_PIECE.fullmatch(text)):
            return Piece(bytes([int(match[1], 16)]), raw=True, special=special)
        if plan.bare_first and plan.bare_first in original:
            return Piece(text.encode(), special=special, bare=original.replace(plan.bare_first, "").encode())
        return Piece(text.encode(), special=special)
