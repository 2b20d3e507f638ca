"""Text to token ids, as the model's own tokenizer files say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from tokenizers import Tokenizer as HfTokenizer

from scheduler_svc.api.text.pieces import PieceTable

# No vocabulary has a piece this long: a text above this many bytes a token of context cannot fit, whatever it says.
MAX_PIECE_BYTES = 512
MAX_ID = 1 << 22  # the library makes tables of as many entries as the highest id; the largest real one is a million
MAX_ADDED = 1 << 20  # characters of all added tokens: the library takes a hundred bytes or so for each
SHORT_TEXT = 2048  # characters that are encoded in less time than a thread, or a release of the GIL, would cost


class BadTokenizer(ValueError):
    """The tokenizer's files cannot be used; the message says why."""


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] | None = None  # a list: of a piece and its score, by id


class _File(msgspec.Struct):
    """What is read of tokenizer.json before the library reads it."""

    model: _Model
    added_tokens: list[_Added] | None = None


def _check_sizes(tokenizer_json: bytes) -> None:
    try:
        file = msgspec.json.decode(tokenizer_json, type=_File)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadTokenizer(f"tokenizer.json: {error}") from error
    vocab, added = file.model.vocab, file.added_tokens or []
    size = sum(len(token.content) for token in added)
    if size > MAX_ADDED:
        raise BadTokenizer(f"tokenizer.json: added tokens of {size} characters together, must be at most {MAX_ADDED}")
    ids = [*(vocab.values() if isinstance(vocab, dict) else ()), *(token.id for token in added)]
    highest = max(ids, default=0)
    if highest >= MAX_ID:
        raise BadTokenizer(f"tokenizer.json: token id {highest}, must be below {MAX_ID}")


@contextmanager
def _library() -> Iterator[None]:
    """Around the library's work: whatever goes wrong is the fault of the tokenizer's files. It raises bare Exception,
    and, where it panics, a BaseException that would go through every handler, and end tasks and threads."""
    try:
        yield
    except BadTokenizer:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise BadTokenizer(f"tokenizer.json: {error}") from error
        raise


class Tokenizer:
    """``pieces`` is for decoding. Encoding a long text releases the GIL: it belongs in a thread (see request.py)."""

    def __init__(self, tokenizer_json: bytes, config: dict[str, Any]) -> None:
        _check_sizes(tokenizer_json)
        with _library():
            self._hf = HfTokenizer.from_str(tokenizer_json.decode())
            # Truncation and padding are for training batches; a prompt is never cut silently.
            self._hf.no_truncation()
            self._hf.no_padding()
            self.pieces = PieceTable(self._hf)
        self.special_texts = special_texts(config)
        with _library():
            self._prefix = self._bos_prefix(config)

    def encode(self, text: str, *, bos: bool) -> list[int]:
        """Token ids of ``text``; special tokens spelled out in it are recognised. ``bos``: begin as the tokenizer
        begins a text (nothing, for many models); never adds an end-of-text token. Raises BadTokenizer."""
        # Of the library's calls only the batch ones release the GIL. Seconds of `encode` would stop the whole process.
        with _library():
            if len(text) <= SHORT_TEXT:
                ids: list[int] = self._hf.encode(text, add_special_tokens=False).ids
            else:
                ids = self._hf.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._prefix + ids if bos else ids

    def _bos_prefix(self, config: dict[str, Any]) -> list[int]:
        """What the tokenizer puts before a text: by its post-processor, unless ``add_bos_token`` says otherwise."""
        wanted = config.get("add_bos_token")
        if wanted is False:
            return []
        probe = "a"
        framed = self._hf.encode(probe, add_special_tokens=True).ids
        bare = self._hf.encode(probe, add_special_tokens=False).ids
        start = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0) if bare else 0
        if start or not wanted:
            return list(framed[:start])
        bos = self._hf.token_to_id(self.special_texts.get("bos_token", ""))
        if bos is None:
            raise BadTokenizer("tokenizer_config.json: add_bos_token, but no bos_token in the vocabulary")
        return [bos]


def special_texts(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, by name, as chat templates expect them."""
    texts = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts
