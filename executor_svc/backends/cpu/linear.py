"""The forms of a weight matrix on the CPU, in torch's own products.

The float ones are not batch invariant alone: ``row_tile`` makes them so. int8 is, its sums being exact."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from executor_svc.backends.cpu.quantize import quantize_groups

WEIGHTS = ("float16", "float32", "int8")


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


class Int8Linear:
    """int8 weights and activations, a scale for each group of both (``quantize``); the sum of a group is exact.

    Not by ``torch._int_mm``: where the CPU has no VNNI it adds pairs of products in 16 bits, which saturates (seen
    with 2.13). In float32 the products of a group sum exactly, in any order.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        values, scales = quantize_groups(weight.float())
        self._values, self._scales = values.transpose(0, 1).contiguous(), scales.T.contiguous()
        self.shape = (weight.shape[0], weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize_groups(x)
        y = torch.zeros(len(x), self.shape[0])
        for group, (weight, weight_scales) in enumerate(zip(self._values, self._scales, strict=True)):
            sums = F.linear(values[:, group].float(), weight.float())
            y += sums * weight_scales * scales[:, group, None]
        return y


def make_linear(weight: torch.Tensor, weights: str) -> Linear:
    """``weight`` [N, K] of any float type; ``weights`` is one of ``WEIGHTS``."""
    if weights == "float16":
        return Float16Linear(weight)
    if weights == "float32":
        return Float32Linear(weight)
    if weights == "int8":
        return Int8Linear(weight)
    raise ValueError(f"weights {weights!r}: not one of {WEIGHTS}")
