"""The forms of a weight matrix on the CPU, in torch's own products.

The float ones are not batch invariant alone: ``row_tile`` makes them so. int8 is, its sums being exact."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from executor_svc.backends.cpu.quantize import LIMIT, quantize_rows

WEIGHTS = ("float16", "float32", "int8")
_EXACT_TERMS = 2**24 // LIMIT**2  # so many products of two int8 numbers sum exactly in float32, in any order


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
    """int8 weights, one scale an output; activations as int8, one scale a row; exact sums (``quantize``)."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._values, self._scales = quantize_rows(weight.float())
        self.shape = (weight.shape[0], weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize_rows(x)
        return int8_products(values, self._values).float() * self._scales * scales[:, None]


def int8_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 [M, K], int8 [N, K] -> int32 [M, N], exact."""
    if _int_mm_is_exact():
        return torch._int_mm(x, weight.T)
    pieces = zip(x.split(_EXACT_TERMS, dim=1), weight.split(_EXACT_TERMS, dim=1), strict=True)
    total = torch.zeros(len(x), len(weight), dtype=torch.int32)
    for x_piece, weight_piece in pieces:
        total += F.linear(x_piece.float(), weight_piece.float()).to(torch.int32)
    return total


@cache
def _int_mm_is_exact() -> bool:
    """Without VNNI, torch's int8 product sums pairs in 16 bits, which saturates (seen with 2.13 on AVX2)."""
    signs = torch.tensor([1, 1, -1, -1, 1, -1, 1, 1], dtype=torch.int8).repeat(32)
    x, weight = (signs * LIMIT).expand(32, -1).contiguous(), torch.full((64, 256), LIMIT, dtype=torch.int8)
    wanted = int(signs.sum()) * LIMIT**2
    return bool((torch._int_mm(x, weight.T) == wanted).all())


def make_linear(weight: torch.Tensor, weights: str) -> Linear:
    """``weight`` [N, K] of any float type; ``weights`` is one of ``WEIGHTS``."""
    if weights == "float16":
        return Float16Linear(weight)
    if weights == "float32":
        return Float32Linear(weight)
    if weights == "int8":
        return Int8Linear(weight)
    raise ValueError(f"weights {weights!r}: not one of {WEIGHTS}")
