"""A tiny random checkpoint folder, of Llama or another family, for any test that needs a whole model: weights,
tokenizer, template.

>>> folder = make_tiny_llama(tmp_path / "tiny")          # ~0.2 s, a few hundred KB
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

BOS, EOS, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "A scheduler decides who runs next; an executor runs one step after another, tokens in and tokens out.",
    '{"name": "value", "list": [1, 2, 3], "nested": {"true": false, "null": null}}',
    "Größe, naïve café, 東京, привет, emoji 🙂🚀 and 0123456789 digits.",
]


def make_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer with individual digits, trained on a few sentences; every byte has a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in (UNKNOWN, BOS, EOS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def make_tiny_llama(path: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 Llama checkpoint in Hugging Face form to the folder ``path`` and return it.

    Defaults: vocabulary 384, hidden 64, intermediate 96, 2 layers, 4 query and 2 KV heads of 16, context 512, tied
    head; ids 0 ``<|endoftext|>``, 1 ``<|im_start|>`` (bos), 2 ``<|im_end|>`` (eos). ``overrides`` are
    ``transformers.LlamaConfig`` arguments. The same seed and overrides give the same weights.
    """
    return make_tiny_model("Llama", path, seed, **overrides)


def make_tiny_model(kind: str, path: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """The same of any family: ``kind`` as in the names of its classes in ``transformers`` (``Gemma3`` has a text
    config of its own); ``overrides`` are arguments of its config."""
    import transformers

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "initializer_range": 0.15,  # large enough that greedy text of random weights varies
    } | overrides
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**settings)
    mean = 0.0 if kind.startswith("Gemma") else 1.0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # a norm of all ones would hide a forgotten weight
                    parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
                elif name.endswith("bias"):
                    parameter.copy_(0.3 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = [settings["eos_token_id"]]
    model.save_pretrained(folder, safe_serialization=True)
    make_tokenizer(settings["vocab_size"]).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": settings["bos_token_id"], "eos_token_id": [settings["eos_token_id"]]})
    )
    return folder
