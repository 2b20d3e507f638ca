"""Arithmetic from IEEE-exact tensor operations only, so that a value's bits never depend on its neighbours.

``torch.exp`` and ``sum`` may compute an element in a vector body or in a scalar tail, with different last bits,
depending on where it stands. Additions, multiplications, divisions and square roots cannot differ.
"""

from __future__ import annotations

import torch

_LOG2_E = 1.44269504
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2, highest power first.
_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

# tanh(x) = x + x^3 p(x^2): the Taylor coefficients, highest power first.
_TANH = (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3)


def exact_exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for float32, within 2 ulp; exactly 1 at 0; 0 below -87.3; clamped (not inf) above 88; NaN stays NaN."""
    z = x.clamp(-87.4, 88.0)
    n = torch.round(z * _LOG2_E)
    r = z - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = torch.full_like(r, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        p = p * r + coefficient
    p = p * (r * r) + r + 1.0
    power_of_two = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < -87.3, torch.zeros_like(x), p * power_of_two)


def exact_tanh(x: torch.Tensor) -> torch.Tensor:
    """tanh of float32, within 4 ulp; NaN stays NaN. Small arguments by the series, as 1 - e^-2x would cancel."""
    squared = x * x
    series = torch.full_like(x, _TANH[0])
    for coefficient in _TANH[1:]:
        series = series * squared + coefficient
    decayed = exact_exp(-2.0 * x.abs())
    large = (1.0 - decayed) / (1.0 + decayed)
    return torch.where(x.abs() < 0.35, x + x * squared * series, torch.copysign(large, x))


def exact_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis by halving: a tree that depends on the axis' length alone. [..., N] -> [..., 1]"""
    while (n := x.shape[-1]) > 1:
        half = n // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([folded, x[..., 2 * half :]], dim=-1) if n % 2 else folded
    return x
