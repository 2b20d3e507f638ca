"""The CPU backend of one model: packed linears, the operations beside them, and what its numbers depend on."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from executor_svc.backends.cpu.linear import WEIGHTS, Linear, make_linear
from executor_svc.backends.cpu.ops import CpuOps
from executor_svc.backends.cpu.row_tile import Probed, TiledLinear, probe
from executor_svc.models.config import ModelConfig

log = logging.getLogger(__name__)

ATTENTION = ("numba", "torch")


class CpuBackend:
    """Collects a model's linears while it loads; ``finish`` probes them and returns the numerics description."""

    def __init__(self, ops: CpuOps, weights: str, threads: int) -> None:
        self.ops = ops
        self.row_tile = 1
        self._weights = weights
        self._threads = threads
        self._linears: list[_Deferred] = []

    def linear(self, weight: torch.Tensor) -> _Deferred:
        """[N, K] -> a callable [M, K] -> [M, N], usable after ``finish``; M a multiple of ``row_tile``."""
        deferred = _Deferred(make_linear(weight, self._weights))
        self._linears.append(deferred)
        return deferred

    def keep(self, embedding: torch.Tensor) -> torch.Tensor:
        """The embedding as stored in memory: like the linears, it is float16 or float32."""
        return embedding.to(torch.float16 if self._weights == "float16" else torch.float32)

    def finish(self) -> str:
        """Probe row counts, fix every linear's scheme, and say in words what the numbers depend on."""
        probed: Probed = probe([deferred.linear for deferred in self._linears], self._threads)
        for deferred in self._linears:
            deferred.tiled = TiledLinear(deferred.linear, probed.schemes[deferred.linear.shape])
        self.row_tile = probed.tile
        return (
            f"cpu {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, weights {self._weights}, "
            f"attention {self.ops.name}, kv float32, row tile {probed.tile} {probed.digest}"
            + ("" if probed.invariant else f", threads {self._threads}")
        )


class _Deferred:
    """A linear whose scheme is known only after all linears are."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.tiled: TiledLinear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self.tiled is not None, "finish() was not called"
        return self.tiled(x)


def make_backend(
    config: ModelConfig, rope: torch.Tensor, weights: str, threads: int, attention: str | None
) -> CpuBackend:
    """``attention`` None: numba where it is installed. ``ValueError`` for an unknown option."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r}: not one of {WEIGHTS}")
    if attention not in (None, *ATTENTION):
        raise ValueError(f"attention {attention!r}: not one of {ATTENTION}")
    from executor_svc.backends.cpu.torch_ops import TorchOps

    if attention is None:
        attention = "numba" if find_spec("numba") and find_spec("executor_svc.backends.cpu.numba_ops") else "torch"
    if attention == "torch":
        return CpuBackend(TorchOps(config, rope), weights, threads)
    from executor_svc.backends.cpu.numba_ops import NumbaOps

    return CpuBackend(NumbaOps(config, rope, threads), weights, threads)
