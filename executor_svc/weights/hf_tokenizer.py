"""The text side of a Hugging Face folder: tokenizer, special tokens, chat template, generation defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from tokenizers import AddedToken

from executor_svc.models.config import ModelConfig
from executor_svc.models.hf_config import token_id_list
from executor_svc.weights import assets as asset_files
from executor_svc.weights import sentencepiece
from executor_svc.weights.errors import CheckpointError
from executor_svc.weights.folder import MAX_LARGE, ModelFolder
from executor_svc.weights.gguf_tokenizer import framed


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here; the rest is skipped, not decoded."""

    added_tokens: list[_Added] | None = None


def read_assets(folder: ModelFolder, config: ModelConfig) -> tuple[ModelConfig, dict[str, bytes]]:
    """The config with every id that ends a text, and the assets (see ``Checkpoint``)."""
    stated = folder.json("tokenizer_config.json") or {}
    generation = folder.json("generation_config.json") or {}
    template = _chat_template(folder, stated)
    bos, eos = (_token_text(stated.get(key)) for key in ("bos_token", "eos_token"))
    add_bos = stated.get("add_bos_token")
    add_bos = add_bos if isinstance(add_bos, bool) else None
    tokenizer = folder.bytes("tokenizer.json", MAX_LARGE)
    if tokenizer is None:
        tokenizer = _from_sentencepiece(folder, stated, bos, add_bos is not False)
    ends = token_id_list(generation.get("eos_token_id"), "generation_config: eos_token_id") + config.eos_token_ids
    ends += tuple(asset_files.end_of_turn_ids(_special_tokens(tokenizer), template))
    config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(ends)))
    out = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": asset_files.tokenizer_config(bos, eos, add_bos),
        "generation_config.json": asset_files.generation_config(config, config.eos_token_ids, generation),
    }
    if template:
        out["chat_template.jinja"] = template.encode()
    return config, out


def _chat_template(folder: ModelFolder, stated: dict[str, Any]) -> str | None:
    """A file of its own, else tokenizer_config.json's: one, or the one named default."""
    template = folder.text("chat_template.jinja")
    if template is not None:
        return template
    value = (folder.json("chat_template.json") or stated).get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _from_sentencepiece(folder: ModelFolder, stated: dict[str, Any], bos: str | None, add_bos: bool) -> bytes:
    """tokenizer.json made from tokenizer.model and the tokens that the folder adds to it."""
    data = folder.bytes("tokenizer.model", MAX_LARGE)
    if data is None:
        raise CheckpointError(f"{folder.path}: no tokenizer.json and no tokenizer.model")
    tokenizer = sentencepiece.build(sentencepiece.read_model(data, str(folder.path / "tokenizer.model")))
    for index, token in sorted(_added_tokens(folder, stated).items()):
        known = tokenizer.token_to_id(token.content)
        if known is None and index == tokenizer.get_vocab_size():
            known = index
        if known != index:
            raise CheckpointError(f"{folder.path}: added token {token.content!r} has id {index}, where it cannot be")
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    first = "<s>" if bos is None else bos
    first_id = tokenizer.token_to_id(first)
    if add_bos and first_id is not None:
        tokenizer.post_processor = framed(first, first_id, byte_level=False)
    return tokenizer.to_str().encode()


def _added_tokens(folder: ModelFolder, stated: dict[str, Any]) -> dict[int, AddedToken]:
    """Both spellings: added_tokens.json (text -> id), and tokenizer_config.json's (id -> text and how it is found)."""
    added: dict[int, AddedToken] = {}
    try:
        for text, index in (folder.json("added_tokens.json") or {}).items():
            added[int(index)] = AddedToken(text, special=False, normalized=False)
        for index, token in (stated.get("added_tokens_decoder") or {}).items():
            flags = {key: bool(token.get(key)) for key in ("special", "lstrip", "rstrip", "single_word", "normalized")}
            added[int(index)] = AddedToken(token["content"], **flags)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{folder.path}: added tokens: {type(error).__name__}: {error}") from error
    return added


def _special_tokens(tokenizer: bytes) -> list[tuple[int, str]]:
    try:
        added = msgspec.json.decode(tokenizer, type=_TokenizerFile).added_tokens or []
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"tokenizer.json: {error}") from error
    return [(token.id, token.content) for token in added if token.special]


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json spells a token as a string or as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
