"""Log probabilities through the whole service, of prompt and outputs, equal those of ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from tests.e2e.harness import Cluster
from tests.e2e.streams import CALL_TIMEOUT, random_prompt, request
from tests.e2e.verify import settled

TOP = 2


def test_equal_the_reference(shared: Cluster, tiny: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # as the executor keeps them by default
                parameter.copy_(parameter.half().float())
    prompt = random_prompt(300, seed=77)
    message = request(prompt, 12, temperature=1.2, seed=5, n=2)
    message.sampling.repetition_penalty = 1.3
    message.output.logprobs = message.output.prompt_logprobs = TOP
    with grpc.insecure_channel(shared.address) as channel:
        answer = pb_grpc.InferenceStub(channel).Generate(message, timeout=CALL_TIMEOUT)
    assert [entry.token_id for entry in answer.prompt_logprobs] == prompt[1:]
    assert len(answer.choices) == 2
    for choice in answer.choices:
        ids = list(choice.token_ids)
        assert [entry.token_id for entry in choice.logprobs] == ids
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([prompt + ids])).logits[0].double(), -1)
        for position, entry in enumerate([*answer.prompt_logprobs, *choice.logprobs], 1):
            check(entry, expected[position - 1])
    settled(shared)


def check(entry: pb.TokenLogprob, expected: Any) -> None:
    value = float(expected[entry.token_id])
    assert entry.logprob == pytest.approx(value, abs=1e-4)
    assert int((expected > value + 1e-4).sum()) < entry.rank <= int((expected > value - 1e-4).sum())
    best = expected.topk(TOP).values.tolist()
    assert [top.logprob for top in entry.top] == pytest.approx(best, abs=1e-4)
    assert [float(expected[top.token_id]) for top in entry.top] == pytest.approx(best, abs=1e-4)
