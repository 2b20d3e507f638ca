"""Configs of every family as they are found: older spellings, what they leave out, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.models.config import ModelConfig, RopeConfig
from executor_svc.models.hf_config import parse_hf_config
from executor_svc.weights.checkpoint import open_checkpoint
from executor_svc.weights.errors import CheckpointError
from tests.executor.model.families import CASES

_SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip


def parse(architecture: str, **changes: Any) -> ModelConfig:
    return parse_hf_config({"architectures": [f"{architecture}ForCausalLM"], **_SIZES, **changes})


def test_what_a_file_may_leave_out() -> None:
    """As published: the values that the reference's classes have by default are often not in the file."""
    gemma2 = parse("Gemma2", hidden_activation="gelu_pytorch_tanh", sliding_window_size=4096)
    assert (gemma2.head_dim, gemma2.num_kv_heads, gemma2.tie_embeddings) == (256, 4, True)
    assert (gemma2.windows, gemma2.attention_softcap, gemma2.final_softcap) == ((4096, 0, 4096, 0), 50.0, 30.0)
    assert (gemma2.embedding_scale, gemma2.attention_scale, gemma2.activation) == (8.0, 0.0, "gelu_tanh")
    assert parse("Mistral").windows == (4096,) * 4
    assert parse("Mistral", sliding_window=None).windows == ()
    assert parse("Qwen2", sliding_window=32, max_window_layers=2).windows == ()
    qwen2 = parse("Qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=3)
    assert (qwen2.windows, qwen2.qkv_bias, qwen2.output_bias) == ((0, 0, 0, 32), True, False)
    assert parse("Qwen2", use_sliding_window=True, sliding_window=32).windows == ()  # max_window_layers is 28
    assert parse("Qwen3").head_dim == 128
    mixtral = parse("Mixtral")
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.expert_intermediate_size) == (8, 2, 96)
    assert (mixtral.rope.theta, mixtral.normalize_experts) == (1e6, True)
    moe = parse("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=2)
    assert (moe.dense_layers, moe.normalize_experts, moe.head_dim) == ((0, 2), False, 16)
    assert parse("Qwen3Moe", num_experts=4, mlp_only_layers=[0, 1, 2, 3]).num_experts == 0


def test_gemma3_as_published() -> None:
    """Older files: a text_config of little more than sizes, two thetas, and a scaling of the full layers alone."""
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
        "image_token_index": 262144, "mm_tokens_per_image": 256, "vision_config": {"hidden_size": 1152},
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }  # fmt: skip
    config = parse_hf_config(outer)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.context_length, config.eos_token_ids, config.bos_token_id) == (131072, (1, 106), 2)
    assert config.windows == tuple(0 if (layer + 1) % 6 == 0 else 1024 for layer in range(34))
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.local_rope == RopeConfig(theta=1e4)
    text = outer["text_config"] | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2}
    config = parse_hf_config(outer | {"text_config": text})
    assert (config.rope.theta, config.windows[:3]) == (5e5, (1024, 0, 1024))
    assert config.local_rope == RopeConfig(theta=2e4)
    same = {"rope_type": "default", "rope_theta": 1e4}
    text |= {"rope_scaling": None, "rope_parameters": {"full_attention": same, "sliding_attention": same}}
    assert parse_hf_config(outer | {"text_config": text}).local_rope is None  # nothing that differs


@pytest.mark.parametrize(
    ("architecture", "changes", "word"),
    [
        ("Llama", {"sliding_window": 64}, "sliding_window = 64 is not known for llama"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Llama", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Llama", {"num_experts": 4}, "num_experts"),
        ("Llama", {"bos_token_id": "x"}, "bos_token_id"),
        ("Llama", {"num_hidden_layers": 10**6}, "1000000 layers"),
        ("Mistral", {"sliding_window": 0}, "sliding_window = 0"),
        ("Mistral", {"sliding_window": "all"}, "sliding_window"),
        ("Mistral", {"attention_bias": True}, "attention_bias"),
        ("Mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "no sliding_window"),
        ("Qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("Qwen2", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("Qwen3", {"head_dim": 15}, "head_dim"),
        ("Gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("Gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping"),
        ("Gemma2", {"final_logit_softcapping": float("nan")}, "final_softcap"),
        ("Gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("Gemma2", {"sliding_window": 64, "sliding_window_size": 32}, "sliding_window_size"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("Phi3", {"partial_rotary_factor": 0.3125}, "rotary_dim = 5"),
        ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 3}, "3 experts a token of 2"),
        ("Mixtral", {"num_local_experts": 10**9}, "1000000000 experts"),
        ("Qwen3Moe", {"num_experts": 4, "num_local_experts": 8}, "num_experts"),
        ("Qwen3Moe", {"num_experts": 4, "mlp_only_layers": [9]}, "mlp_only_layers"),
        ("Qwen3Moe", {"num_experts": 4, "norm_topk_prob": 1}, "norm_topk_prob"),
        ("Qwen3Moe", {"num_experts": 4, "shared_expert_intermediate_size": 8}, "shared_expert"),
        ("Gemma", {}, "GemmaForCausalLM"),
        ("Qwen2Moe", {}, "Qwen2MoeForCausalLM"),
    ],
)
def test_refused_by_name(architecture: str, changes: dict[str, Any], word: str) -> None:
    gemma = {"hidden_activation": "gelu_pytorch_tanh"} if architecture.startswith("Gemma") else {}
    with pytest.raises(CheckpointError, match=word):
        parse(architecture, **(gemma | changes))


def test_configs_are_checked_whoever_makes_them() -> None:
    sizes = {
        "family": "llama", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "context_length": 128, "rms_norm_eps": 1e-5,
        "tie_embeddings": True,
    }  # fmt: skip
    assert ModelConfig(**sizes).differences() == ()
    for changes, word in (
        ({"activation": "relu"}, "relu"),
        ({"windows": (4,)}, "1 windows for 2 layers"),
        ({"windows": (4, -1)}, "-1"),
        ({"local_rope": RopeConfig()}, "no layer has one"),
        ({"windows": (4, 0), "local_rope": RopeConfig(rotary_dim=8)}, "different parts"),
        ({"attention_softcap": -1.0}, "attention_softcap"),
        ({"embedding_scale": 0.0}, "embedding_scale"),
        ({"experts_per_token": 1}, "num_experts = 0"),
        ({"num_experts": 2, "experts_per_token": 1}, "expert_intermediate_size"),
        ({"num_experts": 2, "experts_per_token": 1, "expert_intermediate_size": 8, "dense_layers": (1, 0)}, "dense"),
        ({"rope": RopeConfig(kind="yarn")}, "original context"),
    ):
        with pytest.raises(CheckpointError, match=word):
            ModelConfig(**{**sizes, **changes})
    differing = ModelConfig(**sizes, windows=(0, 8), qk_norm=True, rope=RopeConfig(rotary_dim=8))
    assert differing.differences() == ("windows", "qk_norm", "rotary_dim")


def test_the_text_model_of_a_folder_for_images(tmp_path: Path) -> None:
    """Names under language_model, beside an image encoder that text does not need."""
    folder = CASES["gemma3"].make(tmp_path / "m")
    expected, config = dict(open_checkpoint(folder).tensors()), open_checkpoint(folder).config
    tensors, text = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text})
    )
    image = {
        "vision_tower.encoder.weight": torch.ones(2),
        "multi_modal_projector.mm_soft_emb_norm.weight": torch.ones(2),
    }
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(renamed | image, folder / "model.safetensors")
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config == config
        assert {
            name: bool(torch.equal(tensor, expected[name])) for name, tensor in checkpoint.tensors()
        } == dict.fromkeys(expected, True)


def test_experts_stored_in_one_tensor(tmp_path: Path) -> None:
    folder = CASES["qwen3-moe"].make(tmp_path / "m")
    expected = dict(open_checkpoint(folder).tensors())
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}.{i}.{part}.weight") for i in range(8)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{prefix}.down_proj"] = parts["down_proj"]
    save_file(tensors, folder / "model.safetensors")
    got = dict(open_checkpoint(folder).tensors())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)
    tensors[f"{prefix}.down_proj"] = tensors[f"{prefix}.down_proj"][1:]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.down_proj.*expected 8 experts"):
        list(open_checkpoint(folder).tensors())


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight"),
        ("gemma2", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("qwen3-moe", "model.layers.2.mlp.experts.7.up_proj.weight"),
    ],
)
def test_wrong_tensors_of_a_family(tmp_path: Path, case: str, name: str) -> None:
    """Missing, of another shape, or one of another family: by name."""
    folder = CASES[case].make(tmp_path / "m")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = name.removesuffix(".weight").rpartition(".")[2]
    canonical = {"qkv_proj": "_proj", "gate_up_proj": "_proj", "w2": "3.down_proj", "gate": "mlp.gate"}.get(last, last)
    for changed, word in (
        ({key: tensor for key, tensor in tensors.items() if key != name}, canonical),
        (tensors | {name: tensors[name][:-1].contiguous()}, canonical),
        (tensors | {"model.layers.0.self_attn.sinks": torch.ones(4)}, "sinks"),
    ):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=word):
            list(open_checkpoint(folder).tensors())
