"""``config.json`` of a Hugging Face folder -> ``ModelConfig``, refusing by name what the decoder does not do."""

from __future__ import annotations

import re
import struct
from typing import Any

from executor_svc.models.config import ModelConfig
from executor_svc.models.hf_families import BY_ARCHITECTURE, HFFamily
from executor_svc.models.hf_rope import parse_ropes, served_context
from executor_svc.models.hf_settings import Settings
from executor_svc.weights.errors import CheckpointError

# Settings that change the forward pass, with the values that mean "as the decoder does it".
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "pretraining_tp": (1, None),
    "is_llama_config": (True, None),
    "use_bidirectional_attention": (False, None),
}
# Read for every family, or without effect on inference.
_KNOWN = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act",
    "hidden_activation", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "bos_token_id",
    "eos_token_id", "partial_rotary_factor", "attention_dropout", "_attn_implementation_autoset",
    "_attn_implementation", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise",
}  # fmt: skip
# A key that looks like one of these, is set, and is not known above would be silently ignored mathematics.
_SUSPICIOUS = re.compile(
    r"rope|rotary|attn|attention|softcap|window|norm|scal|multiplier|bias|expert|moe|quant|_act|residual|router"
    r"|layer_types|topk|top_k|sparse|only_layers"
)
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id")  # may stand beside text_config instead of in it


def parse_hf_config(config: dict[str, Any]) -> ModelConfig:
    """Raises ``CheckpointError`` naming the first setting that is missing, malformed or unsupported."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in BY_ARCHITECTURE:
        raise CheckpointError(
            f"config: architecture {architectures!r} is not supported (supported: {list(BY_ARCHITECTURE)})"
        )
    family = BY_ARCHITECTURE[architectures[0]]
    text = config.get("text_config")
    if isinstance(text, dict) and architectures[0].endswith("ForConditionalGeneration"):
        config = {key: config[key] for key in _OUTER if key in config} | text
    _refuse_unknown(config, family)
    settings = Settings({**family.defaults, **config})
    num_layers = settings.integer("num_hidden_layers")
    num_heads, hidden_size = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    head_dim = settings.integer("head_dim", hidden_size // max(num_heads, 1))
    intermediate_size = settings.integer("intermediate_size")
    windows = _windows(settings, family.name, num_layers)
    rope, local_rope = parse_ropes(settings, family, head_dim)
    gemma = family.name in ("gemma2", "gemma3")
    bias = settings.boolean("attention_bias")
    return ModelConfig(
        family=family.name,
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        context_length=served_context(settings.integer("max_position_embeddings"), rope),
        rms_norm_eps=settings.number("rms_norm_eps"),
        tie_embeddings=settings.boolean("tie_word_embeddings"),
        rope=rope,
        bos_token_id=next(iter(token_id_list(settings.get("bos_token_id"), "config: bos_token_id")), None),
        eos_token_ids=token_id_list(settings.get("eos_token_id"), "config: eos_token_id"),
        activation=_activation(settings, "hidden_activation" if gemma else "hidden_act"),
        windows=windows,
        local_rope=local_rope if any(windows) and local_rope != rope else None,
        qkv_bias=bias or family.name == "qwen2",
        output_bias=bias,
        mlp_bias=settings.boolean("mlp_bias"),
        qk_norm=family.name in ("qwen3", "qwen3_moe", "gemma3"),
        sandwich_norms=gemma,
        # Rounded to float32, as the reference multiplies.
        embedding_scale=struct.unpack("f", struct.pack("f", hidden_size**0.5))[0] if gemma else 1.0,
        attention_scale=_attention_scale(settings, head_dim) if gemma else 0.0,
        attention_softcap=settings.number("attn_logit_softcapping", 0.0),
        final_softcap=settings.number("final_logit_softcapping", 0.0),
        **_experts(settings, family.name, num_layers, intermediate_size),
    )


def _refuse_unknown(config: dict[str, Any], family: HFFamily) -> None:
    for key, allowed in _REQUIRED_VALUES.items():
        if key in config and config[key] not in allowed:
            raise CheckpointError(f"config: {key} = {config[key]!r} is not supported")
    known = _KNOWN | set(_REQUIRED_VALUES) | set(family.defaults)
    for key, value in config.items():
        if key not in known and _SUSPICIOUS.search(key) and value not in (None, False):
            raise CheckpointError(f"config: setting {key} = {value!r} is not known for {family.name}")


def token_id_list(value: Any, where: str) -> tuple[int, ...]:
    """An id, a list of ids or None -> a tuple of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{where} = {value!r} is not a token id or a list of them")
    return tuple(ids)


def _activation(settings: Settings, key: str) -> str:
    value = settings.get(key)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise CheckpointError(f"config: {key} = {value!r} is not supported (supported: {list(_ACTIVATIONS)})")
    return _ACTIVATIONS[value]


def _attention_scale(settings: Settings, head_dim: int) -> float:
    scalar = settings.number("query_pre_attn_scalar")
    if not scalar > 0.0:
        raise CheckpointError(f"config: query_pre_attn_scalar = {scalar}")
    return 0.0 if scalar == head_dim else scalar**-0.5


def _windows(settings: Settings, family: str, num_layers: int) -> tuple[int, ...]:
    """The window of each layer, or () where none has one."""
    size: int | None = None
    if settings.get("sliding_window") is not None and settings.get("use_sliding_window") is not False:
        size = settings.integer("sliding_window")
        if size < 1:
            raise CheckpointError(f"config: sliding_window = {size}")
    if settings.get("sliding_window_size") not in (None, size):  # an older name of the same
        raise CheckpointError(f"config: sliding_window_size = {settings.get('sliding_window_size')!r}, not {size}")
    kinds = settings.get("layer_types")
    if kinds is None:
        if size is None:
            return ()
        windowed = [_has_window(settings, family, layer) for layer in range(num_layers)]
    else:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise CheckpointError(f"config: layer_types = {kinds!r} for {num_layers} layers")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise CheckpointError(f"config: layer type {kind!r} is not supported")
        windowed = [kind == "sliding_attention" for kind in kinds]
        if any(windowed) and size is None:
            raise CheckpointError("config: layer_types has sliding_attention, but there is no sliding_window")
    return tuple(size if one and size else 0 for one in windowed) if any(windowed) else ()


def _has_window(settings: Settings, family: str, layer: int) -> bool:
    """Which layers have the model's window, where ``layer_types`` does not say."""
    if family in ("qwen2", "qwen3"):
        return layer >= settings.integer("max_window_layers")
    if family == "gemma2":
        return layer % 2 == 0
    if family == "gemma3":
        pattern = settings.integer("sliding_window_pattern", settings.integer("_sliding_window_pattern"))
        if pattern < 1:
            raise CheckpointError(f"config: sliding_window_pattern = {pattern}")
        return (layer + 1) % pattern != 0
    return True


def _experts(settings: Settings, family: str, num_layers: int, intermediate_size: int) -> dict[str, Any]:
    if family == "mixtral":
        return {
            "num_experts": settings.integer("num_local_experts"),
            "experts_per_token": settings.integer("num_experts_per_tok"),
            "expert_intermediate_size": intermediate_size,
        }
    if family != "qwen3_moe":
        return {}
    step, dense = settings.integer("decoder_sparse_step"), settings.get("mlp_only_layers") or []
    if step < 1 or not isinstance(dense, list) or not all(type(i) is int and 0 <= i < num_layers for i in dense):
        raise CheckpointError(f"config: decoder_sparse_step = {step}, mlp_only_layers = {dense!r}")
    dense_layers = tuple(i for i in range(num_layers) if i in dense or (i + 1) % step)
    if len(dense_layers) == num_layers:
        return {}
    names = [key for key in ("num_experts", "num_local_experts") if settings.get(key) is not None]
    counts = {settings.integer(key) for key in names}
    if len(counts) != 1:
        raise CheckpointError(f"config: num_experts = {settings.get('num_experts')!r}")
    return {
        "num_experts": counts.pop(),
        "experts_per_token": settings.integer("num_experts_per_tok"),
        "expert_intermediate_size": settings.integer("moe_intermediate_size"),
        "normalize_experts": settings.boolean("norm_topk_prob"),
        "dense_layers": dense_layers,
    }
