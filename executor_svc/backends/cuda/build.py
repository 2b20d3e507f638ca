"""Filling a model on a device: weights in one floating-point type, fused as kernels and matrix products want them."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F

from executor_svc.backends.cuda.decoder import CudaDecoder
from executor_svc.backends.cuda.device import Device
from executor_svc.backends.cuda.experts import DeviceExperts
from executor_svc.backends.cuda.memory import room_for
from executor_svc.backends.cuda.ops import KernelOps
from executor_svc.kernels.build import SOURCE_DIR
from executor_svc.kernels.experts import ExpertKernels, ExpertShape
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import DecoderLayer, make_layer

WEIGHTS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class CudaLinear:
    """y = x W^T (+ b), by torch: [M, K] -> [M, N] in the weight's type, or in float32 for the head."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, to_float: bool = False) -> None:
        self._weight, self._bias, self._to_float = weight, bias, to_float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y.float() if self._to_float else y


class CudaBuilder:
    """Implements ``CpuBuilder``'s interface for a device."""

    def __init__(
        self,
        config: ModelConfig,
        rope: torch.Tensor,
        weights: str,
        device: Device,
        local_rope: torch.Tensor | None = None,
    ) -> None:
        """``ValueError`` for what this path does not have, by name, before a weight is read."""
        if weights not in WEIGHTS:
            raise ValueError(f"weights {weights!r}: not one of {tuple(WEIGHTS)}")
        self._config, self._weights, self._device = config, weights, device
        self._dtype = WEIGHTS[weights]
        self.kv_type = weights
        self._ops = KernelOps(device, config, rope, self._dtype, local_rope)
        self._expert_kernels = _expert_kernels(config, device, self._dtype) if config.num_experts else None
        self._layers: dict[int, DecoderLayer] = {}
        self._embedding = self._final_norm = torch.empty(0)
        self._head: CudaLinear | None = None

    def set_embedding(self, tensor: torch.Tensor) -> None:
        self._embedding = self._put(tensor)

    def set_head(self, tensor: torch.Tensor) -> None:
        # A tied head comes right after the embedding: one matrix on the device serves both.
        tied = self._config.tie_embeddings and len(self._embedding) > 0
        self._head = CudaLinear(self._embedding if tied else self._put(tensor), to_float=True)

    def set_final_norm(self, tensor: torch.Tensor) -> None:
        self._final_norm = self._put(tensor)

    def set_layer(self, index: int, parts: dict[str, torch.Tensor]) -> None:
        config = self._config

        def fused(*names: str) -> CudaLinear:
            bias = self._joined([f"{name}.bias" for name in names], parts) if f"{names[0]}.bias" in parts else None
            return CudaLinear(self._joined([f"{name}.weight" for name in names], parts), bias)

        def norm(name: str) -> torch.Tensor:
            return self._put(parts[f"{name}.weight"])

        gate_up = down = experts = None
        if config.has_experts(index):
            experts = self._experts(parts)
        else:
            gate_up, down = fused("mlp.gate_proj", "mlp.up_proj"), fused("mlp.down_proj")
        self._layers[index] = make_layer(config, fused, norm, gate_up, down, experts)

    def _experts(self, parts: dict[str, torch.Tensor]) -> DeviceExperts:
        config = self._config
        names = [f"mlp.experts.{expert}" for expert in range(config.num_experts)]

        def stacked(*kinds: str) -> torch.Tensor:
            parts_of = [self._joined([f"{name}.{kind}.weight" for kind in kinds], parts) for name in names]
            with room_for("the model's weights"):
                return torch.stack(parts_of)

        assert self._expert_kernels is not None
        return DeviceExperts(
            self._expert_kernels,
            router=parts["mlp.gate.weight"].to(self._device.launcher.device, torch.float32),
            gate_up=stacked("gate_proj", "up_proj"),
            down=stacked("down_proj"),
            padding=self._ops.padding,
        )

    def _joined(self, names: list[str], parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._put(torch.cat([parts[name].to(self._dtype) for name in names]))

    def numerics(self) -> str:
        """See ``CpuBuilder``. Matrix products of torch depend on the number of rows: a batch is not invariant here."""
        digest = hashlib.sha256()
        for path in sorted(SOURCE_DIR.glob("*.cu*")):
            digest.update(path.read_bytes())
        return f"{self._device.description()}, kernels {digest.hexdigest()[:12]}, weights and kv {self._weights}"

    def build(self, facts: ModelFacts) -> CudaDecoder:
        assert self._head is not None
        layers = [self._layers[index] for index in range(self._config.num_layers)]
        return CudaDecoder(
            self._config, facts, self._device, self._ops, self._embedding, layers, self._final_norm, self._head
        )

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        with room_for("the model's weights"):
            return tensor.to(device=self._device.launcher.device, dtype=self._dtype).contiguous()


def _expert_kernels(config: ModelConfig, device: Device, dtype: torch.dtype) -> ExpertKernels:
    if config.activation != "silu" or config.mlp_bias:
        raise ValueError(f"experts with activation {config.activation!r} or biases: the kernels have silu without")
    shape = ExpertShape(
        dtype,
        config.hidden_size,
        config.expert_intermediate_size,
        config.num_experts,
        config.experts_per_token,
        config.normalize_experts,
    )
    return ExpertKernels(device.launcher, shape)
