"""A ``.gguf`` file: metadata, tensors dequantised one by one, and a tokenizer rebuilt from the metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.models.config import ModelConfig
from executor_svc.models.gguf_config import parse_gguf_metadata
from executor_svc.models.parameters import EMBEDDING, FINAL_NORM, HEAD, checked_tensors
from executor_svc.weights import assets as asset_files
from executor_svc.weights.errors import CheckpointError, reading
from executor_svc.weights.fingerprint import fingerprint_files
from executor_svc.weights.gguf_header import read_header
from executor_svc.weights.gguf_tensors import GGUFTensors
from executor_svc.weights.gguf_tokenizer import build_tokenizer

_GLOBAL = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        fields = header.fields
        self._tensors = GGUFTensors(path, header.tensors)
        if "token_embd.weight" not in header.tensors:
            raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
        factors = ()
        if _ROPE_FACTORS in header.tensors:
            factors = tuple(self._tensors.read(header.tensors.pop(_ROPE_FACTORS)).ravel().tolist())
        with reading(f"{path}: metadata"):
            config = parse_gguf_metadata(
                fields,
                tie_embeddings="output.weight" not in header.tensors,
                vocab_size=header.tensors["token_embd.weight"].shape[0],
                freq_factors=factors,
            )
            self.config, self.assets = _with_assets(config, fields)
        self.fingerprint = fingerprint_files(self.config.canonical_json(), [path])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return checked_tensors(self.config, self._raw_tensors())

    def _raw_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}
        for name, array in self._tensors:
            canonical, part = _canonical_name(name)
            if part in heads:
                array = _unpermuted(name, array, heads[part])
            yield canonical, torch.from_numpy(np.ascontiguousarray(array))


def _canonical_name(name: str) -> tuple[str, str]:
    if name in _GLOBAL:
        return _GLOBAL[name], ""
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[1].isdecimal() and pieces[3] == "weight":
        part = pieces[2]
        if part in _LAYER:
            return f"model.layers.{int(pieces[1])}.{_LAYER[part]}.weight", part
    raise CheckpointError(f"gguf: tensor {name} is not a parameter of this architecture")


def _unpermuted(name: str, weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """GGUF stores query and key rows for interleaved rotary pairs; back to the half-split order of the reference."""
    rows = weight.shape[0]
    if weight.ndim != 2 or rows % (2 * heads):
        raise CheckpointError(f"gguf: tensor {name} of shape {weight.shape} does not split into {heads} heads")
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _with_assets(config: ModelConfig, fields: dict[str, Any]) -> tuple[ModelConfig, dict[str, bytes]]:
    tokenizer = build_tokenizer(fields, config.vocab_size)
    template = fields.get("tokenizer.chat_template")
    eos = config.eos_token_ids + tuple(asset_files.end_of_turn_ids(tokenizer.special_tokens, template))
    config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(eos)))
    out = {
        "tokenizer.json": tokenizer.json,
        "tokenizer_config.json": asset_files.tokenizer_config(tokenizer.bos, tokenizer.eos, tokenizer.add_bos),
        "generation_config.json": asset_files.generation_config(config, config.eos_token_ids, {}),
    }
    if template:
        out["chat_template.jinja"] = template.encode()
    return config, out
