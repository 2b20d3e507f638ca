"""A ``.gguf`` file: metadata, tensors dequantised one by one, and a tokenizer rebuilt from the metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from executor_svc.models.config import ModelConfig
from executor_svc.models.gguf_config import parse_gguf_metadata
from executor_svc.models.gguf_parameters import ROPE_TENSORS, canonical_tensors
from executor_svc.models.parameters import checked_tensors
from executor_svc.weights import assets as asset_files
from executor_svc.weights.errors import CheckpointError, reading
from executor_svc.weights.fingerprint import fingerprint_files
from executor_svc.weights.gguf_header import read_header
from executor_svc.weights.gguf_tensors import GGUFTensors
from executor_svc.weights.gguf_tokenizer import build_tokenizer

_SAMPLING = {
    "temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}  # fmt: skip


class GGUFCheckpoint:
    """See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        fields = header.fields
        self._tensors = GGUFTensors(path, header.tensors)
        if "token_embd.weight" not in header.tensors:
            raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
        factors = {
            name: tuple(self._tensors.read(header.tensors.pop(name)).ravel().tolist())
            for name in ROPE_TENSORS
            if name in header.tensors
        }
        with reading(f"{path}: metadata"):
            config = parse_gguf_metadata(
                fields,
                tie_embeddings="output.weight" not in header.tensors,
                vocab_size=header.tensors["token_embd.weight"].shape[0],
                rope_factors=factors,
            )
            self.config, self.assets = _with_assets(config, fields)
        self.fingerprint = fingerprint_files(self.config.canonical_json(), [path])

    def tensors(self, half: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        return checked_tensors(self.config, canonical_tensors(self.config, self._tensors.read_all(half)))


def _with_assets(config: ModelConfig, fields: dict[str, Any]) -> tuple[ModelConfig, dict[str, bytes]]:
    tokenizer = build_tokenizer(fields, config.vocab_size)
    template = fields.get("tokenizer.chat_template")
    eos = config.eos_token_ids + tuple(asset_files.end_of_turn_ids(tokenizer.special_tokens, template))
    config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(eos)))
    out = {
        "tokenizer.json": tokenizer.json,
        "tokenizer_config.json": asset_files.tokenizer_config(tokenizer.bos, tokenizer.eos, None),
        "generation_config.json": asset_files.generation_config(config, config.eos_token_ids, _sampling(fields)),
    }
    if template:
        out["chat_template.jinja"] = template.encode()
    return config, out


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """``general.sampling.*``, by the names of a generation config."""
    stated = {name: fields.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    return {name: value for name, value in stated.items() if isinstance(value, int | float)}
