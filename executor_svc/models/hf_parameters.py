"""Tensors as Hugging Face folders store them -> the canonical parameters of ``parameters.py``.

Fused matrices are split, names of experts made one, the offset of Gemma's norm weights added, and the tensors of an
image encoder beside a text model left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from executor_svc.models.config import ModelConfig
from executor_svc.weights.errors import CheckpointError

Tensors = Iterable[tuple[str, torch.Tensor]]

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"(.+\.)block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
_FUSED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")
# A model for text and images: where its text model is, and what else there is.
_TEXT = re.compile(r"(?:language_model\.model|model\.language_model)\.(.+)")
_IMAGE = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..+")


def canonical_tensors(config: ModelConfig, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Names that this family does not have pass through, for ``checked_tensors`` to refuse."""
    for name, tensor in tensors:
        if config.family == "gemma3":
            if _IMAGE.fullmatch(name):
                continue
            text = _TEXT.fullmatch(name)
            name = f"model.{text[1]}" if text else name.removeprefix("language_model.")
        if config.family in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            yield name, 1.0 + tensor.float()
        elif config.family == "phi3" and name.endswith(("qkv_proj.weight", "gate_up_proj.weight")):
            yield from _split(config, name, tensor)
        elif config.num_experts:
            yield from _experts(config, name, tensor)
        else:
            yield name, tensor


def _split(config: ModelConfig, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """[q; k; v] or [gate; up], by rows."""
    prefix, _, fused = name.removesuffix(".weight").rpartition(".")
    if fused == "qkv_proj":
        sizes = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
    else:
        sizes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    if tensor.dim() != 2 or len(tensor) != sum(sizes.values()):
        raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {sum(sizes.values())} rows")
    for part, rows in zip(sizes, tensor.split(list(sizes.values())), strict=True):
        yield f"{prefix}.{part}.weight", rows


def _experts(config: ModelConfig, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    single, fused = _MIXTRAL_EXPERT.fullmatch(name), _FUSED_EXPERTS.fullmatch(name)
    if single is not None:
        yield f"{single[1]}mlp.experts.{int(single[2])}.{_MIXTRAL[single[3]]}.weight", tensor
    elif fused is not None:
        rows = 2 * config.expert_intermediate_size if fused[2] == "gate_up_proj" else config.hidden_size
        if tensor.dim() != 3 or tensor.shape[:2] != (config.num_experts, rows):
            raise CheckpointError(
                f"tensor {name} has shape {tuple(tensor.shape)}, expected {config.num_experts} experts of {rows} rows"
            )
        for index, matrix in enumerate(tensor):
            if fused[2] == "down_proj":
                yield f"{fused[1]}.{index}.down_proj.weight", matrix
            else:
                for part, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True):
                    yield f"{fused[1]}.{index}.{part}.weight", half
    else:
        yield name.replace(".block_sparse_moe.gate.", ".mlp.gate."), tensor
