"""Choosing and filling the CPU implementation of a model: compiled (needs numba) or plain torch."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from executor_svc.backends.cpu.experts import Experts
from executor_svc.backends.cpu.linear import WEIGHTS, Linear, make_linear
from executor_svc.backends.cpu.native.supported import reason_against
from executor_svc.backends.cpu.row_tile import TiledLinear, probe
from executor_svc.backends.cpu.torch_ops import TorchOps
from executor_svc.models.base import Model, ModelFacts
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder, DecoderLayer, make_layer

log = logging.getLogger(__name__)

ATTENTION = ("numba", "torch")
KV_TYPES = ("float16", "float32")


class CpuBuilder(Protocol):
    """Receives every parameter once (shapes as in ``parameter_shapes``), then builds the model."""

    @property
    def kv_type(self) -> str:
        """torch's name of the type of the KV cache's elements."""
        ...

    def set_embedding(self, tensor: torch.Tensor) -> None: ...
    def set_head(self, tensor: torch.Tensor) -> None: ...
    def set_final_norm(self, tensor: torch.Tensor) -> None: ...
    def set_layer(self, index: int, parts: dict[str, torch.Tensor]) -> None: ...

    def numerics(self) -> str:
        """In words, all that decides the bits of the results beside weights and ropes. Call it after all
        ``set_...``."""
        ...

    def build(self, facts: ModelFacts) -> Model: ...


class TorchBuilder:
    """The plain torch model: torch's own matrix products, made batch invariant by probing (``row_tile``)."""

    kv_type = "float32"

    def __init__(
        self,
        config: ModelConfig,
        rope: torch.Tensor,
        weights: str,
        threads: int,
        local_rope: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._ops = TorchOps(config, rope, local_rope)
        self._weights = weights
        self._threads = threads
        self._linears: list[_Deferred] = []
        self._layers: dict[int, DecoderLayer] = {}
        self._embedding = self._final_norm = torch.empty(0)
        self._head: _Deferred | None = None
        self._tile = 1

    def set_embedding(self, tensor: torch.Tensor) -> None:
        self._embedding = tensor.to(torch.float16 if self._weights == "float16" else torch.float32)

    def set_head(self, tensor: torch.Tensor) -> None:
        self._head = self._linear(tensor)

    def set_final_norm(self, tensor: torch.Tensor) -> None:
        self._final_norm = tensor.float()

    def set_layer(self, index: int, parts: dict[str, torch.Tensor]) -> None:
        config = self._config

        def fused(*names: str) -> _Deferred:
            weight = torch.cat([parts[f"{name}.weight"].float() for name in names])
            biases = [parts[f"{name}.bias"].float() for name in names if f"{name}.bias" in parts]
            return self._linear(weight, torch.cat(biases) if biases else None)

        def mlp(name: str) -> tuple[_Deferred, _Deferred]:
            return fused(f"{name}.gate_proj", f"{name}.up_proj"), fused(f"{name}.down_proj")

        def norm(name: str) -> torch.Tensor:
            return parts[f"{name}.weight"].float()

        gate_up = down = experts = None
        if config.has_experts(index):
            pairs = [mlp(f"mlp.experts.{expert}") for expert in range(config.num_experts)]
            experts = Experts(
                router=self._linear(parts["mlp.gate.weight"], weights="float32"),  # it is small, and decides much
                gate_up=[pair[0] for pair in pairs],
                down=[pair[1] for pair in pairs],
                activate=getattr(self._ops, f"{config.activation}_mul"),
                per_token=config.experts_per_token,
                normalize=config.normalize_experts,
                row_tile=1,
            )
        else:
            gate_up, down = mlp("mlp")
        self._layers[index] = make_layer(config, fused, norm, gate_up, down, experts)

    def numerics(self) -> str:
        probed = probe([deferred.linear for deferred in self._linears], self._threads)
        for deferred in self._linears:
            deferred.tiled = TiledLinear(deferred.linear, probed.scheme(deferred.linear))
        self._tile = probed.tile
        for layer in self._layers.values():
            if isinstance(layer.experts, Experts):
                layer.experts.row_tile = probed.tile
        threads = "" if probed.invariant else f", threads {self._threads}"
        return (
            f"cpu torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}, weights {self._weights}, "
            f"kv {self.kv_type}, row tile {probed.tile} {probed.digest}{threads}"
        )

    def build(self, facts: ModelFacts) -> Decoder:
        assert self._head is not None
        layers = [self._layers[index] for index in range(self._config.num_layers)]
        return Decoder(
            self._config, facts, self._ops, self._embedding, layers, self._final_norm, self._head, self._tile
        )

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, weights: str = "") -> _Deferred:
        deferred = _Deferred(make_linear(weight, weights or self._weights), bias)
        self._linears.append(deferred)
        return deferred


class _Deferred:
    """A linear, with its bias, whose row scheme is known only after all linears are."""

    def __init__(self, linear: Linear, bias: torch.Tensor | None) -> None:
        self.linear = linear
        self.bias = bias
        self.tiled: TiledLinear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.tiled is not None, "the linears were not probed"
        y = self.tiled(x)
        return y if self.bias is None else y.add_(self.bias)


def make_builder(
    config: ModelConfig,
    rope: torch.Tensor,
    weights: str,
    threads: int,
    attention: str | None,
    local_rope: torch.Tensor | None = None,
    kv_type: str | None = None,
) -> CpuBuilder:
    """``rope`` and ``local_rope``: ``rope_table`` of ``config.rope`` and ``config.local_rope``.
    ``attention``: ``numba`` (the compiled forward), ``torch``, or None for the former where it can run.
    ``kv_type``: of the KV cache, ``float32``, or ``float16`` with the compiled forward only; None for float16 there
    with int8 weights, else float32.

    ``ValueError`` for an unknown option, or for ``numba`` or a float16 cache where it cannot run.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r}: not one of {WEIGHTS}")
    if attention not in (None, *ATTENTION):
        raise ValueError(f"attention {attention!r}: not one of {ATTENTION}")
    if kv_type not in (None, *KV_TYPES):
        raise ValueError(f"KV type {kv_type!r}: not one of {KV_TYPES}")
    if attention != "torch":
        reason = reason_against(config)
        if reason is None:
            from executor_svc.backends.cpu.native.build import NativeBuilder

            kv_type = kv_type or ("float16" if weights == "int8" else "float32")
            return NativeBuilder(config, rope, weights, threads, local_rope, kv_type)
        if attention == "numba":
            raise ValueError(f"attention 'numba' cannot be used: {reason}")
        if kv_type == "float16":
            raise ValueError(f"KV type 'float16' needs the compiled forward, which cannot be used: {reason}")
        log.warning("the compiled forward cannot be used (%s): running in plain torch, which is slower", reason)
    elif kv_type == "float16":
        raise ValueError("KV type 'float16': not with attention 'torch'")
    return TorchBuilder(config, rope, weights, threads, local_rope)
