"""Rotary position embedding tables: cos and sin of every position a model can have."""

from __future__ import annotations

import math

import torch

from executor_svc.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2], radians per position, computed in float32 as the reference does."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "factors":
        return inverse / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    return inverse


def _llama3(inverse: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are slowed by ``factor``, short ones kept, those between interpolated."""
    low_wavelength = rope.original_context / rope.low_freq_factor
    high_wavelength = rope.original_context / rope.high_freq_factor
    wavelength = 2 * math.pi / inverse
    slowed = torch.where(wavelength > low_wavelength, inverse / rope.factor, inverse)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / span
    between = (1 - smooth) * slowed / rope.factor + smooth * slowed
    is_between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(is_between, between, slowed)


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, head_dim]: the first half of a row is cos, the second sin.

    The angle is rounded to float32 as in the reference; cos and sin are taken in float64 so that the table does not
    depend on the machine's vector width.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim)).double()
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()
