"""Write the reference greedy text of a real checkpoint: transformers, float32, on the same dequantised weights.

usage: python -m tests.executor.model.make_reference MODEL.gguf tests/executor/model/reference/smollm2.json [float16]

With ``float16`` the matrices are rounded to float16 first, as ``--weights float16`` serves them; the arithmetic is
float32 all the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from executor_svc.models.config import ModelConfig
from executor_svc.weights.checkpoint import Checkpoint, open_checkpoint

NEW_TOKENS = 80
PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a short story about a lighthouse keeper.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nExplain how a bicycle stays upright.<|im_end|>\n<|im_start|>assistant\n",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "In 1969, the first people walked on the Moon. Since then, 12",
]


def reference_model(checkpoint: Checkpoint, weights: str = "float32") -> Any:
    """The transformers model with the checkpoint's tensors: float32, or matrices that were rounded to float16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c: ModelConfig = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.context_length,
            rms_norm_eps=c.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
            tie_word_embeddings=c.tie_embeddings,
        )
    ).float()
    tensors = {
        name: t.half().float() if weights == "float16" and t.dim() == 2 else t.float()
        for name, t in checkpoint.tensors()
    }
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert set(missing) <= ({"lm_head.weight"} if c.tie_embeddings else set()), missing
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, ids: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens (end of sequence ignored), and the gap between the two largest logits at each."""
    tokens: list[int] = []
    gaps: list[float] = []
    cache, feed = None, ids
    for _ in range(new_tokens):
        result = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        top = result.logits[0, -1].topk(2)
        tokens.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
        feed = tokens[-1:]
    return tokens, gaps


def main() -> None:
    from tokenizers import Tokenizer

    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    weights = sys.argv[3] if len(sys.argv) > 3 else "float32"
    checkpoint = open_checkpoint(source)
    tokenizer = Tokenizer.from_str(checkpoint.assets["tokenizer.json"].decode())
    model = reference_model(checkpoint, weights)
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        tokens, gaps = greedy(model, ids, NEW_TOKENS)
        print(repr(tokenizer.decode(tokens))[:100], min(gaps))
        cases.append({"prompt": prompt, "ids": ids, "tokens": tokens, "gaps": [round(g, 6) for g in gaps]})
    target.write_text(json.dumps({"fingerprint": checkpoint.fingerprint, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
