"""Tiny models of every family, each with what the family varies: head layouts, ties, biases, windows, caps, experts.

Sizes are multiples of 16, as the compiled forward wants them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.executor.model.tiny import make_tiny_model

ATTENTION = ("numba", "torch")
TOLERANCE = 1e-4  # of float32 logits
WINDOW = 24  # tokens, far fewer than the tests' sequences have


@dataclass(frozen=True)
class Case:
    """``without``: each names a difference, and the settings that take it away: another model, if the difference
    does anything."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    without: dict[str, dict[str, Any]] = field(default_factory=dict)

    def make(self, folder: Path) -> Path:
        return make_tiny_model(self.kind, folder, seed=len(self.kind), **self.settings)


_MHA = {"num_key_value_heads": 4}
_MQA = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "head_dim": 32}
_UNTIED = {"tie_word_embeddings": False}
_FULL = {"layer_types": ["full_attention"] * 3}
_GEMMA = {"num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 4, "initializer_range": 0.2}

CASES = {
    "llama-biases": Case(
        "Llama",
        {**_MHA, **_UNTIED, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral-window": Case(
        "Mistral",
        {**_UNTIED, "num_attention_heads": 6, "hidden_size": 48, "head_dim": 16, "sliding_window": WINDOW},
        {"window": {"sliding_window": None}},
    ),
    "qwen2": Case("Qwen2", {"head_dim": 16}),
    "qwen2-window": Case(
        "Qwen2",
        {**_MHA, **_UNTIED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        {"window": {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}},
    ),
    "qwen3": Case("Qwen3", {**_MQA, "num_attention_heads": 4, "hidden_size": 64}),
    "qwen3-biases": Case("Qwen3", {**_MHA, **_UNTIED, "attention_bias": True}),
    "gemma2": Case(
        "Gemma2",
        {**_GEMMA, "head_dim": 32, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        {
            "attention cap": {"attn_logit_softcapping": None},
            "final cap": {"final_logit_softcapping": None},
            "window": _FULL,
            "score scale": {"query_pre_attn_scalar": 32},
        },
    ),
    "gemma3": Case(
        "Gemma3",
        {
            **_GEMMA,
            **_MQA,
            "num_attention_heads": 4,
            "hidden_size": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            },
        },
        {"window": {"sliding_window": 512}},
    ),
    "gemma3-untied-capped": Case(
        "Gemma3",
        {**_GEMMA, **_MHA, **_UNTIED, "sliding_window_pattern": 2, "final_logit_softcapping": 4.0},
        {"final cap": {"final_logit_softcapping": None}},
    ),
    "phi3": Case(
        "Phi3",
        {
            **_UNTIED,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        {"window": {"sliding_window": None}},
    ),
    "mixtral": Case("Mixtral", {**_UNTIED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": Case(
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": WINDOW, **_MHA},
        {"window": {"sliding_window": None}},
    ),
    "qwen3-moe": Case(
        "Qwen3Moe",
        {
            **_UNTIED,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
        {"normalised experts": {"norm_topk_prob": False}},
    ),
    "qwen3-moe-plain": Case(
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
        {"plain experts": {"norm_topk_prob": True}},
    ),
}


def reference_logits(folder: Path, ids: list[int], half: bool = False, **settings: Any) -> torch.Tensor:
    """Of ``transformers`` in float32, fed the whole sequence; ``settings`` replace the folder's. ``half``: matrices are
    rounded to float16 first, as ``--weights float16`` serves them. The attention is the plain one: the fused one leaves
    out softcaps."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **settings)
    with torch.inference_mode():
        for parameter in model.parameters() if half else ():
            if parameter.dim() == 2:
                parameter.copy_(parameter.half())
        return model(torch.tensor([ids])).logits[0]


def reference_logits_by_token(folder: Path, ids: list[int], **settings: Any) -> torch.Tensor:
    """The same, fed token by token with its cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **settings)
    cache, logits = None, []
    with torch.inference_mode():
        for token in ids:
            result = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            logits.append(result.logits[0])
    return torch.cat(logits)


def random_ids(count: int, seed: int, vocab: int = 384) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
