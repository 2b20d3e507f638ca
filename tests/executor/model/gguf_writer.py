"""Write a tiny Hugging Face folder as a GGUF file, the way converters do (query and key rows permuted)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(folder: Path, path: Path, kind: str) -> Path:
    """``kind`` names the type of the matrices (F32, F16, BF16, Q8_0, Q4_0, Q4_1); norms stay float32."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, tokenizer, config, (folder / "chat_template.jinja").read_text())
    quantization = GGMLQuantizationType[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        gguf_name = _NAMES.get(name)
        if gguf_name is None:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            gguf_name = f"blk.{layer}.{_PARTS[part]}.weight"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                n = heads if "q_proj" in part else kv_heads
                tensor = tensor.reshape(n, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(gguf_name, quantize(np.ascontiguousarray(tensor), quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
