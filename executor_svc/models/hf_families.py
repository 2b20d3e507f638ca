"""What ``config.json`` of each family may say, and what it means when it says nothing.

A setting that is not listed here and looks as if it changed the forward pass is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_GEMMA: dict[str, Any] = {  # text_config of a Gemma 3 folder may state little more than its sizes
    "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "bos_token_id": 2,
    "eos_token_id": 1, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
_WINDOW_LAYERS: dict[str, Any] = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}


@dataclass(slots=True, frozen=True)
class HFFamily:
    """``defaults``: settings of this family beside those of all, with their values where the file leaves them out."""

    name: str
    architectures: tuple[str, ...]
    defaults: dict[str, Any] = field(default_factory=dict)
    partial_rotary: bool = False


FAMILIES = (
    HFFamily("llama", ("LlamaForCausalLM",), {"attention_bias": False, "mlp_bias": False}),
    HFFamily("mistral", ("MistralForCausalLM",), {"sliding_window": 4096}),
    HFFamily("qwen2", ("Qwen2ForCausalLM",), {**_WINDOW_LAYERS, "layer_types": None}),
    HFFamily(
        "qwen3",
        ("Qwen3ForCausalLM",),
        {**_WINDOW_LAYERS, "layer_types": None, "attention_bias": False, "head_dim": 128},
    ),
    HFFamily(
        "gemma2",
        ("Gemma2ForCausalLM",),
        {
            **_GEMMA,
            "layer_types": None,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention_bias": False,
            "sliding_window_size": None,
        },
    ),
    HFFamily(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        {
            **_GEMMA,
            "layer_types": None,
            "final_logit_softcapping": None,
            "attention_bias": False,
            "sliding_window_pattern": None,
            "_sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        },
    ),
    HFFamily(
        "phi3",
        ("Phi3ForCausalLM",),
        {"sliding_window": None, "original_max_position_embeddings": 4096},
        partial_rotary=True,
    ),
    HFFamily(
        "mixtral",
        ("MixtralForCausalLM",),
        {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1_000_000.0},
    ),
    HFFamily(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        {
            **_WINDOW_LAYERS,
            "attention_bias": False,
            "num_experts": None,
            "num_local_experts": None,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
            "decoder_sparse_step": 1,
        },
    ),
)
BY_ARCHITECTURE = {architecture: family for family in FAMILIES for architecture in family.architectures}
# How a family is announced, whatever the file's format.
ARCHITECTURES = {family.name: family.architectures[0] for family in FAMILIES}
