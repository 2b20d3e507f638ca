"""GGUF metadata -> ``ModelConfig``, refusing by name what the decoder does not do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor_svc.models.config import ModelConfig, RopeConfig
from executor_svc.weights.errors import CheckpointError

FAMILIES = ("llama",)

_KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "vocab_size",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip
_MUST_BE_ZERO = {"expert_count", "expert_used_count", "attention.causal"}  # present and set: not a plain decoder


def parse_gguf_metadata(
    fields: Mapping[str, Any], tie_embeddings: bool, vocab_size: int, freq_factors: tuple[float, ...]
) -> ModelConfig:
    """``fields`` maps keys to plain values; ``vocab_size`` is the embedding's row count, ``freq_factors`` the tensor
    ``rope_freqs.weight`` or empty. Raises ``CheckpointError`` naming what is missing, malformed or unsupported."""
    family = fields.get("general.architecture")
    if family not in FAMILIES:
        raise CheckpointError(f"gguf: architecture {family!r} is not supported (supported: {list(FAMILIES)})")
    own = {key[len(family) + 1 :]: value for key, value in fields.items() if key.startswith(f"{family}.")}
    for key, value in own.items():
        if key in _MUST_BE_ZERO:
            if (key != "attention.causal" and value) or (key == "attention.causal" and not value):
                raise CheckpointError(f"gguf: {family}.{key} = {value!r} is not supported")
        elif key not in _KNOWN:
            raise CheckpointError(f"gguf: setting {family}.{key} = {value!r} is not known")

    def integer(key: str, default: int | None = None) -> int:
        value = own.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"gguf: {family}.{key} = {value!r} is not an integer")
        return value

    def number(key: str, default: float | None = None) -> float:
        value = own.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"gguf: {family}.{key} = {value!r} is not a number")
        return float(value)

    hidden_size, num_heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden_size // max(num_heads, 1))
    if integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError("gguf: key and value heads of different sizes are not supported")
    if integer("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"gguf: {family}.rope.dimension_count = {own['rope.dimension_count']}: partial rotary")
    if integer("vocab_size", vocab_size) != vocab_size:
        raise CheckpointError(f"gguf: {family}.vocab_size = {own['vocab_size']}, but the embedding has {vocab_size}")
    scaling = own.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise CheckpointError(f"gguf: rope scaling {scaling!r} is not supported")
    if freq_factors and (scaling != "none" or len(freq_factors) != head_dim // 2):
        raise CheckpointError(f"gguf: rope_freqs.weight of {len(freq_factors)} beside rope scaling {scaling!r}")
    eos = [fields[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in fields]
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=integer("feed_forward_length"),
        num_layers=integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=integer("context_length"),
        # The file holds a float32: 1e-5 reads as 9.99999974e-06, and the reference computes with the decimal value.
        rms_norm_eps=float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_embeddings=tie_embeddings,
        rope=RopeConfig(
            theta=number("rope.freq_base", 10000.0),
            kind="factors" if freq_factors else "linear" if scaling == "linear" else "default",
            factor=number("rope.scaling.factor") if scaling == "linear" else 1.0,
            freq_factors=freq_factors,
        ),
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )
