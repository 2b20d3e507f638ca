"""Write a tiny Hugging Face folder as a GGUF file, the way llama.cpp's converters do.

Llama's query and key rows are permuted, experts merged, Gemma's norm offsets added, and what the architecture's name
implies left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize
from safetensors.numpy import load_file

from executor_svc.models.config import ModelConfig
from executor_svc.models.hf_config import parse_hf_config

_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}  # where it is not the family's name
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_EXPERT_PARTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps", "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def write_gguf(folder: Path, path: Path, kind: str) -> Path:
    """``kind`` names the type of the matrices (F32, F16, BF16, Q8_0, Q4_0, Q4_1); norms stay float32."""
    stated = json.loads((folder / "config.json").read_text())
    config = parse_hf_config(stated)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = GGUFWriter(str(path), _ARCHITECTURES.get(config.family, config.family))
    writer.add_name("tiny")
    _add_settings(writer, config, stated["max_position_embeddings"])
    _add_tokenizer(writer, tokenizer, stated, (folder / "chat_template.jinja").read_text())
    quantization = GGMLQuantizationType[kind]
    for name, tensor in _converted(config, load_file(folder / "model.safetensors")).items():
        tensor = np.ascontiguousarray(tensor)
        if tensor.ndim == 1 or kind == "F32":
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantize(tensor, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: Any, config: ModelConfig, context_length: int) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope.theta)
    rope = config.rope
    if rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope.original_context)
    if rope.kind == "longrope":
        writer.add_rope_scaling_attn_factors(rope.attention_factor)
        writer.add_tensor("rope_factors_short.weight", np.array(rope.short_factors, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(rope.long_factors, np.float32))
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
    if config.family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.expert_intermediate_size)
    if config.family in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(max(config.windows, default=0))
    if config.attention_scale:
        writer.add_attention_scale(config.attention_scale)
    if config.family == "gemma2":
        writer.add_attn_logit_softcapping(config.attention_softcap)
        writer.add_final_logit_softcapping(config.final_softcap)
    if config.family == "gemma3":
        writer.add_sliding_window_pattern([window > 0 for window in config.windows])
        if config.local_rope is not None:
            writer.add_float32("gemma3.rope.freq_base_swa", config.local_rope.theta)
        if config.final_softcap:
            writer.add_final_logit_softcapping(config.final_softcap)


def _converted(config: ModelConfig, tensors: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    parts = _PARTS | (_SANDWICH if config.sandwich_norms else {})
    for name, tensor in tensors.items():
        if config.family in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1.0)
        if name in _NAMES:
            out[_NAMES[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        part, _, kind = rest.rpartition(".")
        if ".experts." in part:
            *_, expert, matrix = part.split(".")
            experts.setdefault(f"blk.{layer}.{_EXPERT_PARTS[matrix]}.weight", {})[int(expert)] = tensor
            continue
        if config.family in ("llama", "mixtral") and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_heads if "q_proj" in part else config.num_kv_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        out[f"blk.{layer}.{parts[part]}.{kind}"] = tensor
    return out | {name: np.stack([group[i] for i in range(len(group))]) for name, group in experts.items()}


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any, template: str) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    special = {t["content"] for t in tokenizer["added_tokens"]}
    by_id = {i: t for t, i in vocabulary.items()}
    tokens = [by_id.get(i, f"<unused{i}>") for i in range(config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in special else 5 if i not in by_id else 1 for i, t in enumerate(tokens)])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
