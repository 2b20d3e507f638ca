"""SentencePiece vocabularies as ``tokenizers`` objects: of a ``tokenizer.model`` file, or of what a GGUF file says.

The model file is a protocol buffer; the few fields that matter are declared here, as its public schema numbers them.
BPE: SentencePiece merges the adjacent pair whose union is the piece of the highest score, which is a list of merges
sorted by score. Unigram scores are taken as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from executor_svc.weights.errors import CheckpointError, library

SPACE: Final = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces, in both file formats
MAX_COPIED: Final = 1 << 28  # characters copied to cut all pieces in two: a quarter of a million pieces need 16 million
MAX_ADDED: Final = 1 << 20  # characters of all tokens that are looked for in a text; each takes a hundred bytes or so
_UNIGRAM, _BPE = 1, 2
_BYTE_PIECE: Final = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(slots=True, frozen=True)
class Vocabulary:
    """``pieces``, ``scores`` and ``types`` by id. ``dummy_prefix``: a space is put before a text; ``squeeze``: runs of
    spaces become one, and none is left at either end; ``charsmap``: SentencePiece's compiled normalisation or empty."""

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unigram: bool = False
    dummy_prefix: bool = True
    squeeze: bool = False
    charsmap: bytes = b""

    def special_tokens(self) -> list[tuple[int, str]]:
        return [(i, self.pieces[i]) for i, kind in enumerate(self.types) if kind in (UNKNOWN, CONTROL)]


def check_added(texts: list[str]) -> None:
    """Tokens that are looked for in a text as a whole. Raises ``CheckpointError`` for too many characters."""
    size = sum(map(len, texts))
    if size > MAX_ADDED:
        raise CheckpointError(f"tokenizer: special and added tokens of {size} characters together; at most {MAX_ADDED}")


def build(vocabulary: Vocabulary) -> Tokenizer:
    """Without a post-processor: what goes before a text is the caller's. Raises ``CheckpointError``."""
    pieces, types = vocabulary.pieces, vocabulary.types
    if not len(pieces) == len(types) == len(vocabulary.scores):
        raise CheckpointError(
            f"tokenizer: {len(pieces)} pieces, {len(vocabulary.scores)} scores, {len(types)} types: not one of each"
        )
    if not all(isinstance(score, int | float) and score == score for score in vocabulary.scores):
        raise CheckpointError("tokenizer: a score that is no number")
    if len(set(pieces)) != len(pieces):
        raise CheckpointError("tokenizer: a piece appears twice")
    unknown = [i for i, kind in enumerate(types) if kind == UNKNOWN]
    of_bytes = [pieces[i] for i, kind in enumerate(types) if kind == BYTE]
    if len(of_bytes) not in (0, 256) or not all(_BYTE_PIECE.fullmatch(piece) for piece in of_bytes):
        raise CheckpointError(f"tokenizer: {len(of_bytes)} pieces of a byte: not none, and not one for every byte")
    if len(unknown) > 1:
        raise CheckpointError(f"tokenizer: {len(unknown)} unknown pieces: at most one")
    symbols = [pieces[i] for i, kind in enumerate(types) if kind == USER_DEFINED]
    check_added([*symbols, *(text for _, text in vocabulary.special_tokens())])
    with library("tokenizer"):
        tokenizer = Tokenizer(_model(vocabulary, unknown[0] if unknown else None, bool(of_bytes)))
        tokenizer.normalizer = _normalizer(vocabulary)
    tokenizer.decoder = _decoder(vocabulary.dummy_prefix)
    special = [AddedToken(text, special=True, normalized=False) for _, text in vocabulary.special_tokens()]
    tokenizer.add_special_tokens(special)
    # Symbols are found before anything is merged, the longest first: in the text as typed, or, with a space mark in
    # them (Gemma's runs of spaces), once the marks are in.
    marked = sorted((text for text in symbols if SPACE in text), key=len, reverse=True)
    if marked:
        pattern = Regex("|".join(map(re.escape, marked)))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    added = [AddedToken(text, special=False, normalized=False) for text in symbols if SPACE not in text]
    tokenizer.add_tokens(added)
    return tokenizer


def _model(vocabulary: Vocabulary, unknown: int | None, byte_fallback: bool) -> Any:
    pieces, scores = vocabulary.pieces, vocabulary.scores
    if vocabulary.unigram:
        # A piece that no text may become costs more than any other way to write it.
        never = min(scores) - 1000.0
        usable = {NORMAL, USER_DEFINED}
        scored = [
            (piece, float(score) if kind in usable else never)
            for piece, score, kind in zip(pieces, scores, vocabulary.types, strict=True)
        ]
        return models.Unigram(scored, unk_id=unknown, byte_fallback=byte_fallback)
    return models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=_merges(vocabulary),
        unk_token=None if unknown is None else pieces[unknown],
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first; of one piece's, the one with the longer left part
    first, as in the runs that SentencePiece builds from the left."""
    usable = {
        piece: (-score, i)
        for i, (piece, score, kind) in enumerate(
            zip(vocabulary.pieces, vocabulary.scores, vocabulary.types, strict=True)
        )
        if kind in (NORMAL, USER_DEFINED)
    }
    copied = sum(len(piece) ** 2 for piece in usable)
    if copied > MAX_COPIED:
        raise CheckpointError(f"tokenizer: the squares of the pieces' lengths sum to {copied}; at most {MAX_COPIED}")
    ranked = []
    for piece, rank in usable.items():
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in usable and right in usable:
                ranked.append((rank, -cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _normalizer(vocabulary: Vocabulary) -> Any:
    steps: list[Any] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.squeeze:
        # At the end of a text SentencePiece takes a mark that was typed for a space.
        steps += [normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _decoder(dummy_prefix: bool) -> Any:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if dummy_prefix else steps)


def read_model(data: bytes, where: str) -> Vocabulary:
    """A ``tokenizer.model`` file. Raises ``CheckpointError`` naming what cannot be used."""
    from google.protobuf.message import DecodeError

    model = _model_class()()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError) as error:
        raise CheckpointError(f"{where}: not a SentencePiece model: {error}") from error
    kind, normalizer = model.trainer_spec.model_type, model.normalizer_spec
    if not model.pieces:
        raise CheckpointError(f"{where}: not a SentencePiece model: no pieces")
    if kind not in (_UNIGRAM, _BPE):
        raise CheckpointError(f"{where}: SentencePiece model type {kind} is not supported (1 unigram, 2 BPE)")
    if model.trainer_spec.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise CheckpointError(f"{where}: spaces after words, or not marked, are not supported")
    return Vocabulary(
        pieces=[piece.piece for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        types=[piece.type for piece in model.pieces],
        unigram=kind == _UNIGRAM,
        dummy_prefix=normalizer.add_dummy_prefix,
        squeeze=normalizer.remove_extra_whitespaces,
        charsmap=normalizer.precompiled_charsmap,
    )


@cache
def _model_class() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="stepwire_sentencepiece.proto", package="stepwire_sp", syntax="proto2"
    )

    def message(name: str, *fields: tuple[str, int, int, str]) -> None:
        added = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            one = added.field.add(name=field, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
            if kind == kinds.TYPE_MESSAGE:
                one.type_name = f".{file.package}.{default}"
                if field == "pieces":
                    one.label = kinds.LABEL_REPEATED
            elif default:
                one.default_value = default

    message(
        "Piece",
        ("piece", 1, kinds.TYPE_STRING, ""),
        ("score", 2, kinds.TYPE_FLOAT, ""),
        ("type", 3, kinds.TYPE_INT32, "1"),
    )
    message(
        "Trainer", ("model_type", 3, kinds.TYPE_INT32, "1"), ("treat_whitespace_as_suffix", 24, kinds.TYPE_BOOL, "")
    )
    message(
        "Normalizer",
        ("precompiled_charsmap", 2, kinds.TYPE_BYTES, ""),
        ("add_dummy_prefix", 3, kinds.TYPE_BOOL, "true"),
        ("remove_extra_whitespaces", 4, kinds.TYPE_BOOL, "true"),
        ("escape_whitespaces", 5, kinds.TYPE_BOOL, "true"),
    )
    message(
        "Model",
        ("pieces", 1, kinds.TYPE_MESSAGE, "Piece"),
        ("trainer_spec", 2, kinds.TYPE_MESSAGE, "Trainer"),
        ("normalizer_spec", 3, kinds.TYPE_MESSAGE, "Normalizer"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Model"))
