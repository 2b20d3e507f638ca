"""Tensors as ``.gguf`` files name and lay them out -> the canonical parameters of ``parameters.py``.

The offset of Gemma's norm weights is already in them. Llama files hold the rows of query and key weights in the order
of interleaved rotary pairs; no other family's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.models.config import ModelConfig
from executor_svc.models.parameters import EMBEDDING, FINAL_NORM, HEAD
from executor_svc.weights.errors import CheckpointError

Array = npt.NDArray[Any]

# Factors of inverse frequencies: settings that are stored as tensors.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_GLOBAL = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def canonical_tensors(config: ModelConfig, arrays: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Raises ``CheckpointError`` for a name that no family has, or an array that does not split as it must."""
    for name, array in arrays:
        for canonical, part in _parts(config, name, array):
            yield canonical, torch.from_numpy(np.ascontiguousarray(part))


def _parts(config: ModelConfig, name: str, array: Array) -> Iterator[tuple[str, Array]]:
    if name in _GLOBAL:
        yield _GLOBAL[name], array
        return
    pieces = name.split(".")
    if len(pieces) != 4 or pieces[0] != "blk" or not pieces[1].isdecimal() or pieces[3] not in ("weight", "bias"):
        raise CheckpointError(f"gguf: tensor {name} is not a parameter of this architecture")
    prefix, part, kind = f"model.layers.{int(pieces[1])}", pieces[2], pieces[3]
    if part == "ffn_norm":
        yield f"{prefix}.{'pre_feedforward' if config.sandwich_norms else 'post_attention'}_layernorm.{kind}", array
    elif part in _EXPERTS and kind == "weight":
        if array.ndim != 3 or len(array) != config.num_experts:
            raise CheckpointError(f"gguf: tensor {name} of shape {array.shape}, expected {config.num_experts} experts")
        for expert, matrix in enumerate(array):
            yield f"{prefix}.mlp.experts.{expert}.{_EXPERTS[part]}.weight", matrix
    elif part == "attn_qkv":
        sizes = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        yield from _split(name, array, {f"{prefix}.self_attn.{key}.{kind}": size for key, size in sizes.items()})
    elif part == "ffn_up" and config.family == "phi3":
        halves = {f"{prefix}.mlp.{key}.{kind}": config.intermediate_size for key in ("gate_proj", "up_proj")}
        yield from _split(name, array, halves)
    elif part in _LAYER:
        if part in ("attn_q", "attn_k") and config.family in ("llama", "mixtral"):
            array = _unpermuted(name, array, config.num_heads if part == "attn_q" else config.num_kv_heads)
        yield f"{prefix}.{_LAYER[part]}.{kind}", array
    else:
        raise CheckpointError(f"gguf: tensor {name} is not a parameter of this architecture")


def _split(name: str, array: Array, sizes: dict[str, int]) -> Iterator[tuple[str, Array]]:
    """By rows."""
    if len(array) != sum(sizes.values()):
        raise CheckpointError(f"gguf: tensor {name} of shape {array.shape}, expected {sum(sizes.values())} rows")
    start = 0
    for key, size in sizes.items():
        yield key, array[start : start + size]
        start += size


def _unpermuted(name: str, array: Array, heads: int) -> Array:
    """From interleaved rotary pairs back to the half-split order of the reference; a weight's rows or a bias."""
    rows = len(array)
    if rows % (2 * heads):
        raise CheckpointError(f"gguf: tensor {name} of shape {array.shape} does not split into {heads} heads")
    return array.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
