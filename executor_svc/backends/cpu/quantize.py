"""Symmetric int8 numbers, one scale for each group of consecutive elements of a row: x ~ q * scale, |q| <= 127.

::

    largest = max |x|          scale = largest / 127          q = round_half_even(x * (127 / largest))

The compiled forward (``native/quantize``) computes the same bits. One scale for a whole row is not enough: a row of
activations has a few elements a hundred times as large as the rest (docs/performance.md, *Quality*).
"""

from __future__ import annotations

import torch

LIMIT = 127
TINY = 2.0**-100  # a group whose largest element is below counts as zeros: 127 / largest would be infinite


def group_size(k: int) -> int:
    """Elements of a group in rows of ``k``, a multiple of 16. A function of ``k`` alone."""
    return 32 if k % 32 == 0 else 16


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [M, K] -> int8 [M, K / group, group] and float32 scales [M, K / group]; K a multiple of 16.

    A group with NaN or infinity gets q = 0 and a scale that is not finite, so that its products are NaN.
    """
    rows, k = x.shape
    if k % 16:
        raise ValueError(f"int8 weights of {k} inputs: must be a multiple of 16")
    x = x.view(rows, -1, group_size(k))
    largest = x.abs().amax(dim=2, keepdim=True)
    usable = (largest >= TINY) & (largest < torch.inf)
    # Not LIMIT / largest, which torch computes as a reciprocal and a product: two roundings.
    inverse = torch.div(torch.full_like(largest, LIMIT), largest)
    values = torch.where(usable, x, 0.0) * torch.where(usable, inverse, 0.0)
    return torch.round(values).to(torch.int8), (largest / LIMIT).squeeze(2)
