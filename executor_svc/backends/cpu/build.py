"""Choosing and filling the CPU implementation of a model: compiled (needs numba) or plain torch."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from executor_svc.backends.cpu.linear import WEIGHTS, Linear, make_linear
from executor_svc.backends.cpu.native.supported import reason_against
from executor_svc.backends.cpu.row_tile import TiledLinear, probe
from executor_svc.backends.cpu.torch_ops import TorchOps
from executor_svc.models.base import Model, ModelFacts
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder, DecoderLayer

log = logging.getLogger(__name__)

ATTENTION = ("numba", "torch")


class CpuBuilder(Protocol):
    """Receives every parameter once (shapes as in ``parameter_shapes``), then builds the model."""

    def set_embedding(self, tensor: torch.Tensor) -> None: ...
    def set_head(self, tensor: torch.Tensor) -> None: ...
    def set_final_norm(self, tensor: torch.Tensor) -> None: ...
    def set_layer(self, index: int, parts: dict[str, torch.Tensor]) -> None: ...

    def numerics(self) -> str:
        """In words, all that decides the bits of the results beside the weights. Call it after all ``set_...``."""
        ...

    def build(self, facts: ModelFacts) -> Model: ...


class TorchBuilder:
    """The plain torch model: torch's own matrix products, made batch invariant by probing (``row_tile``)."""

    def __init__(
        self,
        config: ModelConfig,
        rope: torch.Tensor,
        weights: str,
        threads: int,
        local_rope: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._ops = TorchOps(config, rope)
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
        def fused(*names: str) -> _Deferred:
            return self._linear(torch.cat([parts[f"{name}.weight"].float() for name in names]))

        self._layers[index] = DecoderLayer(
            input_norm=parts["input_layernorm.weight"].float(),
            qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            output=fused("self_attn.o_proj"),
            post_norm=parts["post_attention_layernorm.weight"].float(),
            gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
            down=fused("mlp.down_proj"),
        )

    def numerics(self) -> str:
        probed = probe([deferred.linear for deferred in self._linears], self._threads)
        for deferred in self._linears:
            deferred.tiled = TiledLinear(deferred.linear, probed.schemes[deferred.linear.shape])
        self._tile = probed.tile
        threads = "" if probed.invariant else f", threads {self._threads}"
        return (
            f"cpu torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}, weights {self._weights}, "
            f"kv float32, row tile {probed.tile} {probed.digest}{threads}"
        )

    def build(self, facts: ModelFacts) -> Decoder:
        assert self._head is not None
        layers = [self._layers[index] for index in range(self._config.num_layers)]
        return Decoder(
            self._config, facts, self._ops, self._embedding, layers, self._final_norm, self._head, self._tile
        )

    def _linear(self, weight: torch.Tensor) -> _Deferred:
        deferred = _Deferred(make_linear(weight, self._weights))
        self._linears.append(deferred)
        return deferred


class _Deferred:
    """A linear whose row scheme is known only after all linears are."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.tiled: TiledLinear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.tiled is not None, "the linears were not probed"
        return self.tiled(x)


def make_builder(
    config: ModelConfig,
    rope: torch.Tensor,
    weights: str,
    threads: int,
    attention: str | None,
    local_rope: torch.Tensor | None = None,
) -> CpuBuilder:
    """``rope`` and ``local_rope``: ``rope_table`` of ``config.rope`` and ``config.local_rope``.
    ``attention``: ``numba`` (the compiled forward), ``torch``, or None for the former where it can run.

    ``ValueError`` for an unknown option, or for ``numba`` where it cannot run.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r}: not one of {WEIGHTS}")
    if attention not in (None, *ATTENTION):
        raise ValueError(f"attention {attention!r}: not one of {ATTENTION}")
    if attention != "torch":
        reason = reason_against(config)
        if reason is None:
            from executor_svc.backends.cpu.native.build import NativeBuilder

            return NativeBuilder(config, rope, weights, threads, local_rope)
        if attention == "numba":
            raise ValueError(f"attention 'numba' cannot be used: {reason}")
        log.warning("the compiled forward cannot be used (%s): running in plain torch, which is slower", reason)
    return TorchBuilder(config, rope, weights, threads, local_rope)
