"""The rope settings and factor tensors of a GGUF file -> ``RopeConfig``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from executor_svc.models.config import RopeConfig
from executor_svc.models.gguf_settings import GGUFSettings
from executor_svc.weights.errors import CheckpointError

_KNOWN = {
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip


def parse_gguf_rope(
    settings: GGUFSettings, head_dim: int, factors: Mapping[str, tuple[float, ...]], partial: bool
) -> RopeConfig:
    """``partial``: the family may rotate a part of each head. ``yarn`` is as llama.cpp does it where the file says no
    more than its factor: the attention factor follows from that."""
    for key in settings.own_keys():
        if key.startswith("rope.") and key not in _KNOWN:
            raise CheckpointError(f"gguf: setting {settings.name(key)} = {settings.get(key)!r} is not known")
    dim = settings.integer("rope.dimension_count", head_dim)
    if dim != head_dim and not partial:
        raise CheckpointError(f"gguf: {settings.name('rope.dimension_count')} = {dim} of {head_dim} is not supported")
    kind = settings.get("rope.scaling.type") or "none"
    frequencies = factors.get("rope_freqs.weight", ())
    short, long = (factors.get(f"rope_factors_{length}.weight", ()) for length in ("short", "long"))
    if short or long:
        if kind not in ("none", "longrope"):
            raise CheckpointError(f"gguf: rope_factors_short.weight or _long beside rope scaling {kind!r}")
        kind = "longrope"
    elif frequencies:
        if kind != "none":
            raise CheckpointError(f"gguf: rope_freqs.weight of {len(frequencies)} beside rope scaling {kind!r}")
        kind = "factors"
    if kind not in ("none", "linear", "yarn", "longrope", "factors"):
        raise CheckpointError(f"gguf: rope scaling {kind!r} is not supported")
    scaled = kind in ("linear", "yarn")
    factor = settings.number("rope.scaling.factor") if scaled else 1.0
    attention = settings.number("rope.scaling.attn_factor", 1.0)
    if kind != "longrope" and attention != 1.0:
        raise CheckpointError(f"gguf: {settings.name('rope.scaling.attn_factor')} = {attention} for {kind!r}")
    if kind == "yarn":
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return RopeConfig(
        theta=settings.number("rope.freq_base", 10000.0),
        kind="default" if kind == "none" else kind,
        factor=factor,
        original_context=settings.integer("rope.scaling.original_context_length")
        if kind in ("yarn", "longrope")
        else 0,
        freq_factors=frequencies,
        rotary_dim=0 if dim == head_dim else dim,
        attention_factor=attention,
        beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0) if kind == "yarn" else 32.0,
        beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0) if kind == "yarn" else 1.0,
        short_factors=short,
        long_factors=long,
    )
