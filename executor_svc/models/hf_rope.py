"""The rope settings of ``config.json``, in both spellings, -> ``RopeConfig``.

Older files have ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` beside everything else, newer ones all
of it in ``rope_parameters``, which Gemma 3 has once for each type of layer.
"""

from __future__ import annotations

import math
from typing import Any

from executor_svc.models.config import RopeConfig
from executor_svc.models.hf_families import HFFamily
from executor_svc.models.hf_settings import Settings
from executor_svc.weights.errors import CheckpointError

_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
        "original_max_position_embeddings",
    },
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"},
}  # fmt: skip
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def parse_ropes(settings: Settings, family: HFFamily, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of all layers and, where the family has it, that of layers with a window."""
    scaling, parameters = (_object(settings, key) for key in ("rope_scaling", "rope_parameters"))
    if family.name != "gemma3":
        return _parse(settings, family, {**scaling, **parameters}, [scaling, parameters], head_dim), None
    if parameters and not parameters.keys() <= _LAYER_TYPES:
        raise CheckpointError(f"config: rope_parameters = {parameters!r} is not one object for each type of layer")
    full, local = (dict(_sub(parameters, key)) for key in ("full_attention", "sliding_attention"))
    local.setdefault("rope_theta", settings.number("rope_local_base_freq"))
    return (
        _parse(settings, family, {**scaling, **full}, [scaling, full], head_dim),
        _parse(settings, family, local, [local], head_dim),
    )


def served_context(stated: int, rope: RopeConfig) -> int:
    """Tokens that the model is for: more than ``max_position_embeddings`` where a rope type stretches that."""
    if rope.kind in ("dynamic", "yarn"):
        return max(stated, int(rope.original_context * rope.factor))
    return stated


def _object(settings: Settings, key: str) -> dict[str, Any]:
    value = settings.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"config: {key} = {value!r} is not an object")
    return value or {}


def _sub(parameters: dict[str, Any], key: str) -> dict[str, Any]:
    value = parameters.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"config: rope_parameters: {key} = {value!r} is not an object")
    return value or {}


def _parse(
    settings: Settings, family: HFFamily, values: dict[str, Any], sources: list[dict[str, Any]], head_dim: int
) -> RopeConfig:
    stated = [source.get(key) for source in sources for key in ("rope_type", "type")]
    kinds = [kind for kind in stated if kind not in (None, "default")]
    kind = kinds[0] if kinds else "default"
    if any(other != kind for other in kinds):
        raise CheckpointError(f"config: rope types {kinds} contradict each other")
    if family.name == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # as its first files were spelt
    if not isinstance(kind, str) or kind not in _KEYS:
        raise CheckpointError(f"config: rope type {kind!r} is not supported (supported: {list(_KEYS)})")
    others = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key, value in values.items():
        if key not in _KEYS[kind] and key not in others and value is not None:
            raise CheckpointError(f"config: rope setting {key} = {value!r} is not known for type {kind!r}")
    rope = Settings(values)
    portion = rope.number("partial_rotary_factor", settings.number("partial_rotary_factor", 1.0))
    if portion != 1.0 and not (family.partial_rotary and 0.0 < portion < 1.0):
        raise CheckpointError(f"config: partial_rotary_factor = {portion} is not supported for {family.name}")
    return RopeConfig(
        theta=rope.number("rope_theta", settings.number("rope_theta", 10000.0)),
        kind=kind,
        rotary_dim=int(head_dim * portion) if portion != 1.0 else 0,
        **_of_kind(kind, settings, rope),
    )


def _of_kind(kind: str, settings: Settings, rope: Settings) -> dict[str, Any]:
    if kind == "default":
        return {}
    stated = settings.integer("max_position_embeddings")
    if kind in ("linear", "dynamic"):
        return {"factor": rope.number("factor"), "original_context": stated if kind == "dynamic" else 0}
    # Where both are there, the one beside rope_scaling counts: so does the reference.
    original = settings.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", stated)
    )
    if not 1 < original < 2**31:
        raise CheckpointError(f"config: original_max_position_embeddings = {original}")
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {"original_context": original, **{name: rope.number(name) for name in names}}
    factor = rope.number("factor", stated / original)
    stated_attention = rope.get("attention_factor")
    if kind == "longrope":
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
        return {
            "original_context": original,
            "attention_factor": attention if stated_attention is None else rope.number("attention_factor"),
            "short_factors": rope.numbers("short_factor"),
            "long_factors": rope.numbers("long_factor"),
        }
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    attention = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1.0)
    return {
        "original_context": original,
        "factor": factor,
        "attention_factor": attention if stated_attention is None else rope.number("attention_factor"),
        "beta_fast": rope.number("beta_fast", 0.0) or 32.0,
        "beta_slow": rope.number("beta_slow", 0.0) or 1.0,
        "truncate": rope.get("truncate") is None or rope.boolean("truncate"),
    }


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
