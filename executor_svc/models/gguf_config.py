"""GGUF metadata -> ``ModelConfig``, refusing by name what the decoder does not do.

The files leave out what llama.cpp knows by the architecture's name; it is stated here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from executor_svc.models.config import ModelConfig, RopeConfig
from executor_svc.models.gguf_rope import parse_gguf_rope
from executor_svc.models.gguf_settings import GGUFSettings
from executor_svc.models.hf_rope import served_context
from executor_svc.weights.errors import CheckpointError

# llama.cpp's name of an architecture -> the family here (a Mixtral file is a llama with experts).
FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3", "phi3": "phi3",
    "qwen3moe": "qwen3_moe",
}  # fmt: skip
_KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.scale", "vocab_size",
}  # fmt: skip
_WINDOW = {"attention.sliding_window", "attention.sliding_window_pattern"}
_EXPERTS = {
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_norm", "expert_weights_scale",
    "expert_gating_func",
}  # fmt: skip
_OWN = {
    "llama": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "gemma2": _WINDOW | {"attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3": _WINDOW | {"final_logit_softcapping", "rope.freq_base_swa"},
    "phi3": _WINDOW,
}
# Of any architecture: present and set otherwise, it is another forward pass.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "expert_count": (0,), "expert_used_count": (0,), "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1), "attention.sliding_window": (0,),
}  # fmt: skip


def parse_gguf_metadata(
    fields: Mapping[str, Any],
    tie_embeddings: bool,
    vocab_size: int,
    rope_factors: Mapping[str, tuple[float, ...]],
) -> ModelConfig:
    """``fields`` maps keys to plain values; ``vocab_size`` is the embedding's row count, ``rope_factors`` the tensors
    of ``ROPE_TENSORS`` that the file has. Raises ``CheckpointError`` naming what is missing, malformed or
    unsupported."""
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise CheckpointError(f"gguf: architecture {architecture!r} is not supported (supported: {list(FAMILIES)})")
    settings = GGUFSettings(fields, architecture)
    own = _OWN.get(architecture, set())
    _refuse_unknown(settings, own)
    family = "mixtral" if architecture == "llama" and settings.integer("expert_count", 0) else FAMILIES[architecture]
    gemma = family in ("gemma2", "gemma3")
    hidden_size, num_heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    head_dim = settings.integer("attention.key_length", hidden_size // max(num_heads, 1))
    if settings.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError("gguf: key and value heads of different sizes are not supported")
    if settings.integer("vocab_size", vocab_size) != vocab_size:
        raise CheckpointError(
            f"gguf: {architecture}.vocab_size = {settings.get('vocab_size')}, but the embedding has {vocab_size}"
        )
    num_layers, intermediate_size = settings.integer("block_count"), settings.integer("feed_forward_length")
    rope = parse_gguf_rope(settings, head_dim, rope_factors, partial=family == "phi3")
    windows = _windows(settings, family, num_layers) if own >= _WINDOW else ()
    local_rope = None
    if family == "gemma3" and windows:
        local_rope = RopeConfig(theta=settings.number("rope.freq_base_swa", 10000.0))
    eos = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=served_context(settings.integer("context_length"), rope),
        # The file holds a float32: 1e-5 reads as 9.99999974e-06, and the reference computes with the decimal value.
        rms_norm_eps=float(f"{settings.number('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_embeddings=tie_embeddings,
        rope=rope,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        activation="gelu_tanh" if gemma else "silu",
        windows=windows,
        local_rope=local_rope if local_rope != rope else None,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        sandwich_norms=gemma,
        embedding_scale=struct.unpack("f", struct.pack("f", hidden_size**0.5))[0] if gemma else 1.0,
        attention_scale=_attention_scale(settings, gemma, num_layers, hidden_size // max(num_heads, 1), head_dim),
        attention_softcap=settings.number("attn_logit_softcapping", 50.0 if family == "gemma2" else 0.0),
        final_softcap=settings.number("final_logit_softcapping", 30.0 if family == "gemma2" else 0.0),
        **_experts(settings, family, intermediate_size),
    )


def _refuse_unknown(settings: GGUFSettings, own: set[str]) -> None:
    for key in settings.own_keys():
        value = settings.get(key)
        if key in own or key in _KNOWN or (key.startswith("rope.") and key != "rope.freq_base_swa"):
            continue  # those of rope are looked at in gguf_rope.py
        if key not in _REQUIRED_VALUES:
            raise CheckpointError(f"gguf: setting {settings.name(key)} = {value!r} is not known")
        if value not in _REQUIRED_VALUES[key]:
            raise CheckpointError(f"gguf: {settings.name(key)} = {value!r} is not supported")


def _windows(settings: GGUFSettings, family: str, num_layers: int) -> tuple[int, ...]:
    """Gemma 2 has a window in every other layer, Gemma 3 in five of six, unless the file says in which."""
    size = settings.integer("attention.sliding_window", 4096 if family == "gemma2" else 0)
    pattern = settings.get("attention.sliding_window_pattern")
    if pattern is None:
        pattern = {"gemma2": 2, "gemma3": 6}.get(family)
    if pattern is None:
        windowed = [True] * num_layers
    elif isinstance(pattern, list) and len(pattern) == num_layers:
        windowed = [bool(one) for one in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        windowed = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        raise CheckpointError(f"gguf: {settings.name('attention.sliding_window_pattern')} = {pattern!r}")
    return tuple(size if one else 0 for one in windowed) if size and any(windowed) else ()


def _attention_scale(
    settings: GGUFSettings, gemma: bool, num_layers: int, hidden_per_head: int, head_dim: int
) -> float:
    """The largest Gemmas scale by the hidden elements a head; files know them by their number of layers."""
    stated = settings.number("attention.scale", 0.0)
    if stated == 0.0 and gemma and num_layers in (46, 62) and hidden_per_head != head_dim:
        return float(hidden_per_head) ** -0.5
    return stated


def _experts(settings: GGUFSettings, family: str, intermediate_size: int) -> dict[str, Any]:
    if family not in ("mixtral", "qwen3_moe"):
        return {}
    for key in ("expert_weights_scale", "expert_gating_func"):
        if settings.get(key) not in (None, *_REQUIRED_VALUES[key]):
            raise CheckpointError(f"gguf: {settings.name(key)} = {settings.get(key)!r} is not supported")
    return {
        "num_experts": settings.integer("expert_count"),
        "experts_per_token": settings.integer("expert_used_count"),
        "expert_intermediate_size": settings.integer("expert_feed_forward_length", intermediate_size),
        "normalize_experts": settings.get("expert_weights_norm") is not False,
    }
