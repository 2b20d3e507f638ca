"""The assets that the text side needs, in one minimal form whatever the checkpoint's format.

``tokenizer_config.json``: ``bos_token``, ``eos_token`` (strings or null), ``add_bos_token`` where it is stated.
``generation_config.json``: ``eos_token_id`` (always a list), ``bos_token_id``, ``max_context_length``, and temperature,
top_p, top_k, min_p and repetition_penalty where the checkpoint states them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from executor_svc.models.config import ModelConfig

SAMPLING_DEFAULTS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Special tokens that end an assistant's turn in the chat formats in use.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>")


def end_of_turn_ids(special_tokens: Iterable[tuple[int, str]], chat_template: str | None) -> list[int]:
    """Ids of the special tokens by which this chat template ends a turn: generation must stop there too."""
    if not chat_template:
        return []
    return [i for i, text in special_tokens if text in _END_OF_TURN and text in chat_template]


def tokenizer_config(bos: str | None, eos: str | None, add_bos: bool | None) -> bytes:
    """``add_bos`` None: what tokenizer.json itself puts before a text."""
    out = {"bos_token": bos, "eos_token": eos}
    return json.dumps(out if add_bos is None else {**out, "add_bos_token": add_bos}).encode()


def generation_config(config: ModelConfig, eos_ids: tuple[int, ...], stated: dict[str, Any]) -> bytes:
    """``stated`` is the checkpoint's own generation config (may be empty)."""
    out: dict[str, Any] = {
        "eos_token_id": list(eos_ids),
        "bos_token_id": config.bos_token_id,
        "max_context_length": config.context_length,
    }
    out.update({key: stated[key] for key in SAMPLING_DEFAULTS if stated.get(key) is not None})
    return json.dumps(out).encode()
