"""Which models the compiled forward can run here."""

from __future__ import annotations

from importlib.util import find_spec

from executor_svc.backends.cpu.native.layout import QUERY_ROWS
from executor_svc.models.config import ModelConfig

_LANES = 16
# Named differences (``ModelConfig.differences``) that the compiled forward implements.
_DIFFERENCES = frozenset(
    (
        "activation", "windows", "local_rope", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "sandwich_norms",
        "embedding_scale", "attention_scale", "attention_softcap", "final_softcap", "rotary_dim", "num_experts",
        "normalize_experts", "dense_layers",
    )
)  # fmt: skip


def reason_against(config: ModelConfig) -> str | None:
    """Why the compiled forward cannot run this model on this machine; None if it can."""
    if not find_spec("numba"):
        return "numba is not installed"
    from executor_svc.backends.cpu.native.compile import can_run

    if not can_run():
        return "the CPU has no fused multiply-add or no float16 conversion"
    for name in config.differences():
        if name not in _DIFFERENCES:
            return f"{name} = {getattr(config, name)!r} is not implemented there"
    if config.num_experts and config.mlp_bias:
        return "mlp_bias of experts is not implemented there"
    for name in ("hidden_size", "intermediate_size", "head_dim", "expert_intermediate_size"):
        if getattr(config, name) % _LANES:
            return f"{name} {getattr(config, name)} is not a multiple of {_LANES}"
    if config.group_size > QUERY_ROWS:
        return f"{config.group_size} query heads share one KV head, more than {QUERY_ROWS}"
    return None
