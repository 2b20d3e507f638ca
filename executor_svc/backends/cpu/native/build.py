"""Packing a checkpoint's tensors for the compiled forward, one layer at a time."""

from __future__ import annotations

import hashlib

import torch

from executor_svc.backends.cpu.native.decoder import NativeDecoder
from executor_svc.backends.cpu.native.gemm import pack_panels
from executor_svc.backends.cpu.native.vector import LANES
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig

# Raise when a change alters any bit of the results.
ARITHMETIC_VERSION = 1


class NativeBuilder:
    """See ``CpuBuilder``."""

    def __init__(
        self,
        config: ModelConfig,
        rope: torch.Tensor,
        weights: str,
        threads: int,
        local_rope: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._rope = rope
        self._weights = weights
        self._threads = threads
        self._layers: list[tuple[torch.Tensor, ...]] = [()] * config.num_layers
        self._embedding = self._final_norm = self._head = torch.empty(0)

    def set_embedding(self, tensor: torch.Tensor) -> None:
        self._embedding = tensor.to(torch.float16 if self._weights == "float16" else torch.float32)

    def set_head(self, tensor: torch.Tensor) -> None:
        self._head = pack_panels(tensor, self._weights)

    def set_final_norm(self, tensor: torch.Tensor) -> None:
        self._final_norm = tensor.float().contiguous()

    def set_layer(self, index: int, parts: dict[str, torch.Tensor]) -> None:
        def matrix(name: str) -> torch.Tensor:
            return pack_panels(parts[f"{name}.weight"], self._weights)

        gate, up = matrix("mlp.gate_proj"), matrix("mlp.up_proj")
        self._layers[index] = (
            parts["input_layernorm.weight"].float().contiguous(),
            torch.cat([matrix(f"self_attn.{name}_proj") for name in "qkv"]),
            matrix("self_attn.o_proj"),
            parts["post_attention_layernorm.weight"].float().contiguous(),
            torch.stack([gate, up], dim=1).view(-1, *gate.shape[1:]),  # gate and up panels alternate
            matrix("mlp.down_proj"),
        )

    def numerics(self) -> str:
        """The CPU's vector width is not part of it: every element is the same chain of operations on each."""
        rope = hashlib.sha256(self._rope.numpy().tobytes()).hexdigest()[:16]
        return f"cpu native {ARITHMETIC_VERSION}, lanes {LANES}, weights {self._weights}, kv float32, rope {rope}"

    def build(self, facts: ModelFacts) -> NativeDecoder:
        return NativeDecoder(
            self._config, facts, self._weights, self._threads, self._embedding, self._rope, self._layers,
            self._final_norm, self._head,
        )  # fmt: skip
