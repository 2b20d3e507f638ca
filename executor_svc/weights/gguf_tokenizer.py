"""tokenizer.json rebuilt from a GGUF file's ``tokenizer.ggml.*`` metadata: byte-level BPE only.

The file names its pre-tokenizer; each name here maps to the exact rule of the original tokenizer. An unknown name is
refused: a wrong split would give a model that answers, a little worse, with nothing to show why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from executor_svc.weights.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(slots=True, frozen=True)
class BuiltTokenizer:
    json: bytes
    special_tokens: list[tuple[int, str]]
    bos: str | None
    eos: str | None
    add_bos: bool


def _byte_level(use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False), _byte_level(use_regex=False)]
    )


@dataclass(slots=True, frozen=True)
class _Style:
    pre_tokenizer: Callable[[], Any]
    ignore_merges: bool = False  # a piece that is a token itself is not merged from parts
    normalize_nfc: bool = False
    add_bos: bool = False  # where the file does not say


_STYLES = {
    "gpt-2": _Style(lambda: _byte_level(use_regex=True)),
    "smollm": _Style(
        lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])
    ),
    "llama-bpe": _Style(lambda: _split(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True),
    "qwen2": _Style(lambda: _split(_QWEN2_SPLIT), normalize_nfc=True),
}


def build_tokenizer(fields: Mapping[str, Any], vocab_size: int) -> BuiltTokenizer:
    """Raises ``CheckpointError`` naming the tokenizer model, pre-tokenizer or list that cannot be used."""
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise CheckpointError(f"gguf: tokenizer model {fields.get('tokenizer.ggml.model')!r} is not supported")
    name = fields.get("tokenizer.ggml.pre")
    if name not in _STYLES:
        raise CheckpointError(f"gguf: pre-tokenizer {name!r} is not supported (supported: {list(_STYLES)})")
    style = _STYLES[name]
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(tokens) != vocab_size or len(types) != vocab_size or len(set(tokens)) != vocab_size:
        raise CheckpointError(f"gguf: {len(tokens)} tokens, {len(types)} types, embedding of {vocab_size} rows")
    merges = [_pair(merge) for merge in _strings(fields, "tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(
            models.BPE(
                vocab={t: i for i, t in enumerate(tokens)},
                merges=merges,
                ignore_merges=style.ignore_merges,
            )
        )
    except Exception as error:  # the library raises a bare Exception for a merge outside the vocabulary
        raise CheckpointError(f"gguf: tokenizer: {error}") from error
    if style.normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = style.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    special = [(i, tokens[i]) for i, kind in enumerate(types) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for _, text in special])
    added = [tokens[i] for i, kind in enumerate(types) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    bos, eos = (_token(fields, tokens, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos"))
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", style.add_bos)) and bos is not None
    if add_bos:
        assert bos is not None
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
                ),
            ]
        )
    return BuiltTokenizer(tokenizer.to_str().encode(), special, bos, eos, add_bos)


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
