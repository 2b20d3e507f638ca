"""The public door: refusals with their statuses, models, reflection, health."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from tests.e2e.harness import Cluster, HealthWatch
from tests.e2e.streams import GREEDY, one, random_prompt, request
from tests.e2e.verify import settled

REFUSALS: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "temperature": ({"temperature": 101.0}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
    "top_p": ({"top_p": 0.0}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
    "max_tokens": ({"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
    "prompt-too-long": ({"prompt": random_prompt(5000, 1)}, grpc.StatusCode.INVALID_ARGUMENT, "4096"),
    "unknown-id": ({"prompt": [5, 9999]}, grpc.StatusCode.INVALID_ARGUMENT, "9999"),
    "no-prompt": ({"prompt": []}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
    "empty-stop": ({"stop": [""]}, grpc.StatusCode.INVALID_ARGUMENT, "stop"),
    "unknown-model": ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND, "nobody"),
}


@pytest.fixture
def channel(shared: Cluster) -> grpc.Channel:
    with grpc.insecure_channel(shared.address) as channel:
        yield channel
    settled(shared)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(channel: grpc.Channel, name: str) -> None:
    options, code, named = REFUSALS[name]
    stub = pb_grpc.InferenceStub(channel)
    message = request(**({"prompt": [5, 6, 7]} | options))
    for call in (lambda: stub.Generate(message, timeout=20), lambda: list(stub.GenerateStream(message, timeout=20))):
        with pytest.raises(grpc.RpcError) as failure:
            call()
        assert failure.value.code() == code, failure.value
        assert named in failure.value.details()


def test_a_live_id_is_refused(channel: grpc.Channel) -> None:
    stub = pb_grpc.InferenceStub(channel)
    message = request([5, 6, 7], 4000, request_id="twice", **GREEDY)
    call = stub.GenerateStream(message, timeout=60)
    next(call)
    with pytest.raises(grpc.RpcError) as failure:
        stub.Generate(message, timeout=20)
    assert failure.value.code() == grpc.StatusCode.ALREADY_EXISTS
    call.cancel()


def test_list_models(channel: grpc.Channel) -> None:
    models = pb_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=10).models
    assert [model.name for model in models] == ["tiny"]
    (model,) = models
    assert (model.architecture, model.context_length, model.vocab_size) == ("LlamaForCausalLM", 4096, 384)
    assert list(model.eos_token_ids) == [2]
    assert model.accepts_text
    assert model.accepts_chat
    assert model.executors_ready == 1
    assert model.max_sequence_tokens == 4096
    assert model.defaults.temperature == 1.0


def test_text_chat_and_ids(shared: Cluster) -> None:
    """A chat is its rendered text; text is its ids; unary is the stream put together."""
    chat = request([], 12, **GREEDY)
    chat.ClearField("prompt")
    chat.chat.messages.add(role="user", content="Grüße 🙂")
    rendered = "<|im_start|>user\nGrüße 🙂<|im_end|>\n<|im_start|>assistant\n"
    whole, text = one(shared.address, chat), one(shared.address, request(rendered, 12, **GREEDY))
    assert whole.ids == text.ids
    with grpc.insecure_channel(shared.address) as channel:
        unary = pb_grpc.InferenceStub(channel).Generate(chat, timeout=20)
    assert list(unary.choices[0].token_ids) == whole.ids
    assert unary.choices[0].text == whole.text
    assert whole.usage is not None
    assert unary.usage.prompt_tokens == whole.usage.prompt_tokens
    settled(shared)


def test_stop_string_and_choices(shared: Cluster) -> None:
    whole = one(shared.address, request([9, 8, 7], 40, temperature=0.9, seed=5))
    middle = whole.text[len(whole.text) // 2 :][:2]
    cut = one(shared.address, request([9, 8, 7], 40, temperature=0.9, seed=5, stop=[middle]))
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert cut.reason == pb.FINISH_REASON_STOP
    assert cut.finish is not None
    assert cut.finish.stop == middle
    assert cut.usage is not None
    assert cut.usage.completion_tokens == len(cut.ids)
    assert cut.ids == whole.ids[: len(cut.ids)]
    with grpc.insecure_channel(shared.address) as channel:
        both = pb_grpc.InferenceStub(channel).Generate(request([9, 8, 7], 40, temperature=0.9, seed=5, n=2), timeout=30)
    assert list(both.choices[0].token_ids) == whole.ids
    assert both.choices[1].token_ids != both.choices[0].token_ids
    settled(shared)


def test_reflection(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    query = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([query]), timeout=10)
    names = {service.name for service in answer.list_services_response.service}
    assert {"stepwire.v1.Inference", "grpc.health.v1.Health"} <= names


def test_health(shared: Cluster, channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", "stepwire.v1.Inference"):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as failure:
        stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=10)
    assert failure.value.code() == grpc.StatusCode.NOT_FOUND
    with HealthWatch(shared.address, "no.such.Service") as watch:
        watch.wait_for("SERVICE_UNKNOWN")
