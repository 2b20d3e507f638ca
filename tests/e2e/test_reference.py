"""Greedy text equals that of ``transformers`` on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Cluster
from tests.e2e.process import ROOT
from tests.e2e.streams import GREEDY, Answer, common_requests, one, request
from tests.e2e.verify import settled

REAL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_tiny_model(tiny: Path, alone: list[Answer]) -> None:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    model = LlamaForCausalLM.from_pretrained(tiny)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny)
    for message, answer in zip(common_requests(), alone, strict=True):
        if message.sampling.temperature > 0:
            continue
        prompt = list(message.token_ids.ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.ids])).logits[0]
        # Each id is the reference's choice after those before it: so all of them are its greedy text.
        assert answer.ids == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
        text = tokenizer.decode(answer.ids, skip_special_tokens=True)
        assert answer.text in (text, text.rstrip("\ufffd")), "a character cut off by max_tokens may be left out"


@pytest.mark.skipif(not REAL.exists(), reason="models/ holds no real model")
def test_real_model_answers(tmp_path: Path) -> None:
    """One short prompt through the whole of it; the model's own tests compare it at length."""
    with Cluster(tmp_path) as cluster:
        cluster.start_scheduler()
        cluster.start_executor("real", REAL)
        cluster.wait_ready()
        message = request([], 8, ignore_eos=False, **GREEDY)
        message.ClearField("prompt")
        message.chat.messages.add(role="user", content="What is the capital of France?")
        answer = one(cluster.address, message)
        assert answer.text == "The capital of France is Paris."
        settled(cluster)
