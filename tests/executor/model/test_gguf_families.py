"""A GGUF file and a Hugging Face folder of the same weights are the same model, for every family with such files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from executor_svc.models.gguf_config import parse_gguf_metadata
from executor_svc.weights.checkpoint import open_checkpoint
from executor_svc.weights.errors import CheckpointError
from tests.executor.model.families import CASES
from tests.executor.model.gguf_writer import write_gguf
from tests.executor.model.test_rope import LONGROPE, YARN
from tests.executor.model.tiny import make_tiny_model

# Settings that these files have no place for: windows of Mistral and Qwen, dense layers of Qwen3-MoE, biases of Qwen3.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 1}),
    "mixtral": (CASES["mixtral"].kind, CASES["mixtral"].settings),
    "qwen2": (CASES["qwen2"].kind, CASES["qwen2"].settings),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": (CASES["qwen3"].kind, CASES["qwen3"].settings),
    "qwen3-moe": (CASES["qwen3-moe"].kind, CASES["qwen3-moe"].settings | {"mlp_only_layers": []}),
    "gemma2": (CASES["gemma2"].kind, CASES["gemma2"].settings),
    "gemma3": (CASES["gemma3"].kind, CASES["gemma3"].settings),
    "gemma3-untied-capped": (CASES["gemma3-untied-capped"].kind, CASES["gemma3-untied-capped"].settings),
    "phi3": (CASES["phi3"].kind, CASES["phi3"].settings),
    "phi3-longrope": (
        "Phi3",
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_config_and_same_tensors(tmp_path: Path, name: str) -> None:
    kind, settings = MODELS[name]
    folder = make_tiny_model(kind, tmp_path / "m", **settings)
    file, reference = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", "F32")), open_checkpoint(folder)
    # A file's numbers are float32.
    assert _rounded(file.config) == _rounded(reference.config)
    expected = dict(reference.tensors())
    for parameter, tensor in file.tensors():
        assert torch.equal(tensor, expected.pop(parameter)), parameter
    assert not expected


def _rounded(config: Any) -> Any:
    rope = config.rope
    return replace(
        config,
        rope=replace(
            rope,
            attention_factor=round(rope.attention_factor, 6),
            short_factors=tuple(round(factor, 5) for factor in rope.short_factors),
        ),
    )


def _fields(architecture: str, **changes: Any) -> dict[str, Any]:
    own = {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5,
    } | changes  # fmt: skip
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in own.items()}}


def _parse(architecture: str, factors: dict[str, tuple[float, ...]] | None = None, **changes: Any) -> Any:
    return parse_gguf_metadata(_fields(architecture, **changes), True, 384, factors or {})


def test_what_the_architecture_implies() -> None:
    gemma2 = _parse("gemma2", **{"attention.sliding_window": 32})
    assert (gemma2.windows, gemma2.attention_softcap, gemma2.final_softcap) == ((32, 0), 50.0, 30.0)
    gemma3 = _parse("gemma3", **{"block_count": 7, "attention.sliding_window": 32, "rope.freq_base": 1e6})
    assert gemma3.windows == (32, 32, 32, 32, 32, 0, 32)
    assert gemma3.local_rope is not None
    assert gemma3.local_rope.theta == 10000.0
    largest = _parse("gemma2", **{"block_count": 46, "attention.key_length": 8})
    assert largest.attention_scale == 16**-0.5
    assert _parse("qwen2").qkv_bias
    assert _parse("qwen3").qk_norm
    assert not _parse("phi3", **{"attention.sliding_window": 0}).windows


@pytest.mark.parametrize(
    ("architecture", "changes", "word"),
    [
        ("mamba", {}, "mamba"),
        ("llama", {"attention.sliding_window": 64}, r"llama\.attention\.sliding_window = 64"),
        ("llama", {"attention.clamp_kqv": 8.0}, r"llama\.attention\.clamp_kqv"),
        ("llama", {"rope.scaling.type": "dynamic"}, "dynamic"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "original_context_length"),
        ("llama", {"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ("llama", {"rope.scaling.attn_factor": 1.2}, "attn_factor"),
        ("llama", {"rope.dimension_count": 8}, "dimension_count"),
        ("llama", {"attention.value_length": 8}, "different sizes"),
        ("llama", {"vocab_size": 100}, "vocab_size"),
        ("llama", {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2}, "expert_gating_func"),
        ("llama", {"expert_count": 4, "expert_used_count": 5}, "5 experts a token"),
        ("qwen2", {"expert_count": 4}, "expert_count"),
        ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("qwen3moe", {"expert_used_count": 2}, "expert_count"),
        ("gemma3", {"attention.sliding_window": 32, "attention.sliding_window_pattern": [True]}, "window_pattern"),
        ("gemma2", {"attn_logit_softcapping": "x"}, "softcapping"),
        ("phi3", {"rope.dimension_count": 18}, "18"),
        ("phi3", {"block_count": [2]}, "block_count"),
    ],
)
def test_metadata_is_refused_by_name(architecture: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        _parse(architecture, **changes)


def test_factor_tensors_are_checked() -> None:
    for factors, changes, word in (
        ({"rope_freqs.weight": (1.0,)}, {}, "freq_factors: 1 for 8 pairs"),
        ({"rope_freqs.weight": (1.0,) * 8}, {"rope.scaling.type": "linear"}, "linear"),
        ({"rope_factors_long.weight": (1.0,) * 8}, {"rope.scaling.original_context_length": 64}, "short_factors: 0"),
    ):
        with pytest.raises(CheckpointError, match=word):
            _parse("llama", factors, **changes)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    """A tensor of another family, and one that cannot be split."""
    kind, settings = MODELS["phi3"]
    folder = make_tiny_model(kind, tmp_path / "m", **settings)
    original = GGUFWriter.add_tensor
    for name, change in (("attn_qkv", lambda array: array[1:]), ("ffn_up", lambda array: array[:-1])):

        def add(self: Any, key: str, tensor: Any, name: str = name, change: Any = change, **rest: Any) -> None:
            original(self, key, change(tensor) if name in key else tensor, **rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GGUFWriter, "add_tensor", add)
            path = write_gguf(folder, tmp_path / f"{name}.gguf", "F32")
        with pytest.raises(CheckpointError, match=rf"blk\.0\.{name}\.weight"):
            list(open_checkpoint(path).tensors())
