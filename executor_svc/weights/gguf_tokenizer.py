"""tokenizer.json rebuilt from a GGUF file's ``tokenizer.ggml.*`` metadata: byte-level BPE and SentencePiece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from executor_svc.weights import sentencepiece
from executor_svc.weights.errors import CheckpointError, library
from executor_svc.weights.pre_tokenizers import style_of
from executor_svc.weights.sentencepiece import CONTROL, NORMAL, USER_DEFINED

MODELS = ("gpt2", "llama")  # byte-level BPE, and SentencePiece BPE


@dataclass(slots=True, frozen=True)
class BuiltTokenizer:
    """``json`` says itself whether ``bos`` goes before a text."""

    json: bytes
    special_tokens: list[tuple[int, str]]
    bos: str | None
    eos: str | None


def build_tokenizer(fields: Mapping[str, Any], vocab_size: int) -> BuiltTokenizer:
    """Raises ``CheckpointError`` naming the tokenizer model, pre-tokenizer or list that cannot be used."""
    kind = fields.get("tokenizer.ggml.model")
    if kind not in MODELS:
        raise CheckpointError(f"gguf: tokenizer model {kind!r} is not supported (supported: {list(MODELS)})")
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    if len(tokens) != vocab_size or len(set(tokens)) != vocab_size:
        raise CheckpointError(f"gguf: {len(set(tokens))} different tokens, but the embedding has {vocab_size} rows")
    types = fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"gguf: tokenizer.ggml.token_type is not a list of {len(tokens)}")
    if kind == "gpt2":
        tokenizer, special, add_bos = _byte_level(fields, tokens, types)
    else:
        tokenizer, special, add_bos = _sentencepiece(fields, tokens, types)
    bos, eos = (_token(fields, tokens, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", add_bos)) and bos is not None
    if add_bos:
        assert bos is not None
        tokenizer.post_processor = framed(bos, tokens.index(bos), byte_level=kind == "gpt2")
    return BuiltTokenizer(tokenizer.to_str().encode(), special, bos, eos)


def framed(bos: str, index: int, byte_level: bool) -> Any:
    """The post-processor that puts ``bos`` before a text."""
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, index)]
    )
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template]) if byte_level else template


def _byte_level(
    fields: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[Tokenizer, list[tuple[int, str]], bool]:
    special = [(i, tokens[i]) for i, kind in enumerate(types) if kind == CONTROL]
    added = [tokens[i] for i, kind in enumerate(types) if kind == USER_DEFINED]
    sentencepiece.check_added([*added, *(text for _, text in special)])
    style = style_of(fields.get("tokenizer.ggml.pre"), tokens)
    merges = [_pair(merge) for merge in _strings(fields, "tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    with library("gguf: tokenizer"):
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style.ignore_merges))
    if style.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = style.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for _, text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer, special, style.add_bos


def _sentencepiece(
    fields: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[Tokenizer, list[tuple[int, str]], bool]:
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list):
        raise CheckpointError("gguf: tokenizer.ggml.scores is not a list")
    charsmap = fields.get("tokenizer.ggml.precompiled_charsmap") or []
    if not isinstance(charsmap, list) or not all(isinstance(i, int) and -128 <= i < 256 for i in charsmap):
        raise CheckpointError("gguf: tokenizer.ggml.precompiled_charsmap is not a list of bytes")
    vocabulary = sentencepiece.Vocabulary(
        pieces=tokens,
        scores=scores,
        types=types,
        dummy_prefix=bool(fields.get("tokenizer.ggml.add_space_prefix", True)),
        squeeze=bool(fields.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        charsmap=bytes(i & 0xFF for i in charsmap),
    )
    return sentencepiece.build(vocabulary), vocabulary.special_tokens(), True


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _strings(fields: Mapping[str, Any], key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"gguf: {key} is not a list of strings")
    return value


def _token(fields: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    index = fields.get(key)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CheckpointError(f"gguf: {key} = {index!r} is outside the vocabulary")
    return tokens[index]
