"""``config.json`` of a Hugging Face folder -> ``ModelConfig``, refusing by name what the decoder does not do."""

from __future__ import annotations

import re
from typing import Any

from executor_svc.models.config import ModelConfig, RopeConfig
from executor_svc.weights.errors import CheckpointError

FAMILIES = {"LlamaForCausalLM": "llama"}

# Settings that change the forward pass, with the values that mean "as the decoder does it".
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, 1.0, None),
    "rope_interleaved": (False, None),
    "pretraining_tp": (1, None),
    "is_llama_config": (True, None),
}
# Read elsewhere in this file, or without effect on inference.
_KNOWN = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id",
    "attention_dropout", "_attn_implementation_autoset",
}  # fmt: skip
# A key that looks like one of these, is set, and is not known above would be silently ignored mathematics.
_SUSPICIOUS = re.compile(
    r"rope|rotary|attn|attention|softcap|window|norm|scal|multiplier|bias|expert|moe|quant|_act|residual|router"
)
_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}  # fmt: skip


def parse_hf_config(config: dict[str, Any]) -> ModelConfig:
    """Raises ``CheckpointError`` naming the first setting that is missing, malformed or unsupported."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in FAMILIES:
        raise CheckpointError(f"config: architecture {architectures!r} is not supported (supported: {list(FAMILIES)})")
    for key, allowed in _REQUIRED_VALUES.items():
        if key in config and config[key] not in allowed:
            raise CheckpointError(f"config: {key} = {config[key]!r} is not supported")
    for key, value in config.items():
        if key not in _KNOWN and key not in _REQUIRED_VALUES and _SUSPICIOUS.search(key) and value not in (None, False):
            raise CheckpointError(f"config: setting {key} = {value!r} is not known")
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    kv_heads = config.get("num_key_value_heads")
    head_dim = config.get("head_dim")
    eos = config.get("eos_token_id")
    return ModelConfig(
        family=FAMILIES[architectures[0]],
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads if kv_heads is None else _integer(config, "num_key_value_heads"),
        head_dim=hidden_size // max(num_heads, 1) if head_dim is None else _integer(config, "head_dim"),
        context_length=_integer(config, "max_position_embeddings"),
        rms_norm_eps=_number(config, "rms_norm_eps"),
        tie_embeddings=_boolean(config, "tie_word_embeddings"),
        rope=_parse_rope(config),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=token_id_list(eos, "config: eos_token_id"),
    )


def token_id_list(value: Any, where: str) -> tuple[int, ...]:
    """An id, a list of ids or None -> a tuple of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{where} = {value!r} is not a token id or a list of them")
    return tuple(ids)


def _parse_rope(config: dict[str, Any]) -> RopeConfig:
    """Both spellings: ``rope_theta`` + ``rope_scaling`` (older) and ``rope_parameters`` (newer)."""
    scaling: dict[str, Any] = {}
    kinds: set[Any] = set()
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"config: {key} = {value!r} is not an object")
        value = dict(value or {})
        kinds.update(k for k in (value.pop("rope_type", None), value.pop("type", None)) if k and k != "default")
        scaling.update(value)
    if len(kinds) > 1:
        raise CheckpointError(f"config: rope types {sorted(map(str, kinds))} contradict each other")
    kind = kinds.pop() if kinds else "default"
    theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
    if kind not in _ROPE_KEYS:
        raise CheckpointError(f"config: rope type {kind!r} is not supported (supported: {list(_ROPE_KEYS)})")
    if not isinstance(theta, int | float) or isinstance(theta, bool):
        raise CheckpointError(f"config: rope_theta = {theta!r}")
    for key in scaling:
        if key not in _ROPE_KEYS[kind] and scaling[key] is not None:
            raise CheckpointError(f"config: rope setting {key} = {scaling[key]!r} is not known for type {kind!r}")
    for key in sorted(_ROPE_KEYS[kind]):
        _number(scaling, key)
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_context=int(scaling.get("original_max_position_embeddings", 0)),
    )


def _integer(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"config: {key} = {value!r} is not an integer")
    return value


def _number(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"config: {key} = {value!r} is not a number")
    return float(value)


def _boolean(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"config: {key} = {value!r} is not true or false")
    return value
