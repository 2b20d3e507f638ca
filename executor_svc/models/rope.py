"""Rotary position embedding tables: cos and sin of every position a model can have.

A table is a function of position alone: a key is rotated once, when it is written to the cache, and chunks, prefix
hits and continuations all read it later. Two types are not that in the reference, where the whole sequence is rotated
by what suits its length so far; how they are defined here:

* ``dynamic``: position p is rotated as the reference does when it is fed token by token: by the base for p + 1 tokens
  (for the original context, as long as that is longer).
* ``longrope``: the long factors at every position if the served context exceeds the original one, else the short.
"""

from __future__ import annotations

import hashlib
import math

import torch

from executor_svc.models.config import RopeConfig

_ROWS_AT_ONCE = 1 << 14  # of a table in float64


def inverse_frequencies(rope: RopeConfig, dim: int, num_positions: int) -> torch.Tensor:
    """Radians per position, computed in float32 as the reference does: float32 [dim / 2], or [num_positions, dim / 2]
    where they depend on it (``dynamic``). ``dim``: elements that rotate; ``num_positions``: the served context."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    if rope.kind == "longrope":
        factors = rope.long_factors if num_positions > rope.original_context else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    if rope.kind == "dynamic":
        return _dynamic(rope, exponents, num_positions)
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "factors":
        return inverse / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    assert rope.kind == "default", rope.kind
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


def _dynamic(rope: RopeConfig, exponents: torch.Tensor, num_positions: int) -> torch.Tensor:
    """The base grows with the length p + 1 beyond the original context. One row at a time, as the reference does it:
    a power's last bit can depend on where in a large tensor it stands."""
    power = len(exponents) / (len(exponents) - 1)  # dim / (dim - 2)

    def row(length: torch.Tensor) -> torch.Tensor:
        stretch = (rope.factor * length / rope.original_context) - (rope.factor - 1)
        return 1.0 / ((rope.theta * stretch**power) ** exponents)

    lengths = torch.arange(rope.original_context, max(num_positions, rope.original_context) + 1)
    rows = torch.stack([row(length) for length in lengths])
    return torch.cat([rows[:1].expand(rope.original_context - 1, -1), rows])[:num_positions]


def _yarn(rope: RopeConfig, dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): pairs that turn more than ``beta_fast`` times within the original context are kept,
    those that turn less than ``beta_slow`` times slowed by ``factor``, with a ramp over the pairs between."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(rope.original_context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    kept = 1 - slowed
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: the first half of a row is cos, the second sin, both times the rope's
    attention factor.

    The angle is rounded to float32 as in the reference; cos and sin are taken in float64 so that the table does not
    depend on the machine's vector width.
    """
    dim = rope.rotary_dim or head_dim
    inverse = inverse_frequencies(rope, dim, num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32)
    table = torch.empty(num_positions, dim)
    for start in range(0, num_positions, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        angles = (positions[rows, None] * (inverse[rows] if inverse.dim() == 2 else inverse)).double()
        # The factor is applied to rounded values, as in the reference.
        table[rows] = torch.cat([angles.cos(), angles.sin()], dim=1).float() * rope.attention_factor
    return table


def table_digest(*tables: torch.Tensor | None) -> str:
    """Hex, of the first rows: enough to tell apart the tables that one checkpoint can be served with (``longrope``),
    and not how long they are."""
    digest = hashlib.sha256()
    for table in tables:
        digest.update(b"" if table is None else table[:16].numpy().tobytes())
    return digest.hexdigest()[:16]
