"""The two forms of a weight matrix on the CPU. Neither is batch invariant alone: ``row_tile.RowTile`` makes it so."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

WEIGHTS = ("float16", "float32")


class Linear(Protocol):
    """y = x W^T. float32 [M, K] -> float32 [M, N], a new tensor."""

    shape: tuple[int, int]  # (N, K)

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Float32Linear:
    """Plain float32 weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.float().contiguous()
        self.shape = (weight.shape[0], weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight)


class Float16Linear:
    """Weights packed as float16, arithmetic in float32: half the memory traffic, which is what a decode step costs."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self.shape = (weight.shape[0], weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


def make_linear(weight: torch.Tensor, weights: str) -> Linear:
    """``weight`` [N, K] of any float type; ``weights`` is one of ``WEIGHTS``."""
    if weights == "float16":
        return Float16Linear(weight)
    if weights == "float32":
        return Float32Linear(weight)
    raise ValueError(f"weights {weights!r}: not one of {WEIGHTS}")
