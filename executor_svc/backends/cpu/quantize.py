"""Symmetric int8 numbers, one scale a row: x ~ q * scale, q an integer from -127 to 127.

::

    largest = max |x|          scale = largest / 127          q = round_half_even(x * (127 / largest))

The compiled forward (``native/quantize``) computes the same bits.
"""

from __future__ import annotations

import torch

LIMIT = 127
TINY = 2.0**-100  # a row whose largest element is below counts as zeros: 127 / largest would be infinite


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [M, K] -> int8 [M, K] and float32 scales [M].

    A row with NaN or infinity gets q = 0 and a scale that is not finite, so that its products are NaN.
    """
    largest = x.abs().amax(dim=1, keepdim=True)
    usable = (largest >= TINY) & (largest < torch.inf)
    # Not LIMIT / largest, which torch computes as a reciprocal and a product: two roundings.
    inverse = torch.div(torch.full_like(largest, LIMIT), largest)
    values = torch.where(usable, x, 0.0) * torch.where(usable, inverse, 0.0)
    return torch.round(values).to(torch.int8), (largest / LIMIT).squeeze(1)
