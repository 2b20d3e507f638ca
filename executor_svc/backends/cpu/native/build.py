"""Packing a checkpoint's tensors for the compiled forward, one layer at a time."""

from __future__ import annotations

import torch

from executor_svc.backends.cpu.native import layout as at
from executor_svc.backends.cpu.native.decoder import NativeDecoder
from executor_svc.backends.cpu.native.experts import pack_router
from executor_svc.backends.cpu.native.gemm import pack_panels
from executor_svc.backends.cpu.native.gemm_int8 import host_method, pack_panels_int8
from executor_svc.backends.cpu.native.vector import LANES
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig

# Raise when a change alters any bit of the results.
ARITHMETIC_VERSION = 2


class NativeBuilder:
    """See ``CpuBuilder``."""

    def __init__(
        self,
        config: ModelConfig,
        rope: torch.Tensor,
        weights: str,
        threads: int,
        local_rope: torch.Tensor | None = None,
        kv_type: str = "float32",
    ) -> None:
        self._config = config
        self._ropes = rope, rope if local_rope is None else local_rope
        self._weights = weights
        self.kv_type = kv_type
        self._threads = threads
        self._layers: list[dict[int, torch.Tensor]] = [{}] * config.num_layers
        self._embedding = self._final_norm = self._head = torch.empty(0)

    def set_embedding(self, tensor: torch.Tensor) -> None:
        self._embedding = tensor.to(torch.float32 if self._weights == "float32" else torch.float16)

    def set_head(self, tensor: torch.Tensor) -> None:
        self._head = self._pack(tensor)

    def set_final_norm(self, tensor: torch.Tensor) -> None:
        self._final_norm = tensor.float().contiguous()

    def set_layer(self, index: int, parts: dict[str, torch.Tensor]) -> None:
        def matrix(name: str) -> torch.Tensor:
            return self._pack(parts[f"{name}.weight"])

        def vector(name: str) -> torch.Tensor:
            return parts[name].float().contiguous()

        def gate_up(name: str) -> torch.Tensor:
            return _alternate(matrix(f"{name}.gate_proj"), matrix(f"{name}.up_proj"))

        config = self._config
        self._layers[index] = layer = {
            at.INPUT_NORM: vector("input_layernorm.weight"),
            at.QKV: torch.cat([matrix(f"self_attn.{name}_proj") for name in "qkv"]),
            at.OUTPUT: matrix("self_attn.o_proj"),
            at.POST_NORM: vector("post_attention_layernorm.weight"),
        }
        if config.has_experts(index):
            names = [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
            layer[at.ROUTER] = pack_router(parts["mlp.gate.weight"])
            layer[at.GATE_UP] = torch.stack([gate_up(name) for name in names])
            layer[at.DOWN] = torch.stack([matrix(f"{name}.down_proj") for name in names])
        else:
            layer[at.GATE_UP], layer[at.DOWN] = gate_up("mlp"), matrix("mlp.down_proj")
        if config.sandwich_norms:
            layer[at.ATTENTION_OUT_NORM] = layer[at.POST_NORM]
            layer[at.POST_NORM] = vector("pre_feedforward_layernorm.weight")
            layer[at.MLP_OUT_NORM] = vector("post_feedforward_layernorm.weight")
        if config.qk_norm:
            layer[at.Q_NORM] = vector("self_attn.q_norm.weight")
            layer[at.K_NORM] = vector("self_attn.k_norm.weight")
        if config.qkv_bias:
            layer[at.QKV_BIAS] = torch.cat([vector(f"self_attn.{name}_proj.bias") for name in "qkv"])
        if config.output_bias:
            layer[at.OUTPUT_BIAS] = vector("self_attn.o_proj.bias")
        if config.mlp_bias:
            biases = (vector(f"mlp.{name}_proj.bias").view(-1, LANES) for name in ("gate", "up"))
            layer[at.GATE_UP_BIAS] = _alternate(*biases)
            layer[at.DOWN_BIAS] = vector("mlp.down_proj.bias")

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        if self._weights == "int8":
            return pack_panels_int8(weight, host_method())
        return pack_panels(weight, self._weights)

    def numerics(self) -> str:
        """The CPU's vector width is not part of it: every element is the same chain of operations on each."""
        return f"cpu native {ARITHMETIC_VERSION}, lanes {LANES}, weights {self._weights}, kv {self.kv_type}"

    def build(self, facts: ModelFacts) -> NativeDecoder:
        return NativeDecoder(
            self._config, facts, self._weights, self.kv_type, self._threads, self._embedding, self._ropes,
            self._layers, self._final_norm, self._head,
        )  # fmt: skip


def _alternate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Panels of both, in turns."""
    return torch.stack([gate, up], dim=1).view(-1, *gate.shape[1:])
