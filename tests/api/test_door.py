"""What is refused, with which status, and what the refusal says."""

from __future__ import annotations

import math

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from tests.api.fake_core import model_state
from tests.api.rig import ANSWER_IDS, rig, run_async, text_request

IDS = pb.TokenIds(ids=[1])
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def ids_request(**kwargs: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=IDS, **kwargs)  # type: ignore[arg-type]


def sampling(**kwargs: object) -> pb.GenerateRequest:
    return ids_request(sampling=pb.Sampling(**kwargs))  # type: ignore[arg-type]


def stopping(**kwargs: object) -> pb.GenerateRequest:
    return ids_request(stopping=pb.Stopping(**kwargs))  # type: ignore[arg-type]


def continued(*choices: pb.ContinuedChoice, **kwargs: object) -> pb.GenerateRequest:
    kwargs.setdefault("sampling", pb.Sampling(temperature=0))
    return ids_request(continue_from=choices, **kwargs)


# (request, field, and what the message must hold)
REFUSED: list[tuple[pb.GenerateRequest, str, tuple[str, ...]]] = [
    (pb.GenerateRequest(), "prompt", ("absent", "text, token_ids and chat")),
    (pb.GenerateRequest(text=""), "prompt", ("empty",)),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids", ("empty",)),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 401])), "token_ids[1]", ("401", "below")),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])), "token_ids[0]", ("4294967295", "401")),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 256)), "prompt", ("256 tokens", "256")),
    # Too many are refused before any of them is looked at: tens of millions fit into a message.
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[401] * 256)), "prompt", ("256 tokens",)),
    (sampling(allowed_token_ids=[1] * 402), "sampling.allowed_token_ids", ("402 ids", "at most 401")),
    (continued(pb.ContinuedChoice(token_ids=[401] * 257, finished=True)), "continue_from[0].token_ids", ("257 ids",)),
    (pb.GenerateRequest(text="the " * 300), "prompt", ("tokens", "256")),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="x" * 200_000)])), "chat", ("200000 characters",)),
    (pb.GenerateRequest(text="x" * 200_000), "text", ("200000 characters",)),
    (pb.GenerateRequest(chat=pb.Chat()), "chat.messages", ("0 messages",)),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])), "chat.messages[0].role", ("empty",)),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="critic")])), "chat", ("no critics",)),
    (ids_request(request_id="r" * 129), "request_id", ("129", "128")),
    (ids_request(priority=101), "priority", ("101", "-100 to 100")),
    (ids_request(priority=-101), "priority", ("-101",)),
    (sampling(temperature=math.nan), "sampling.temperature", ("nan", "0 to 100")),
    (sampling(temperature=math.inf), "sampling.temperature", ("inf",)),
    (sampling(temperature=-0.5), "sampling.temperature", ("-0.5",)),
    (sampling(temperature=100.5), "sampling.temperature", ("100.5",)),
    (sampling(top_p=0.0), "sampling.top_p", ("0.0", "above 0")),
    (sampling(top_p=1.5), "sampling.top_p", ("1.5",)),
    (sampling(top_p=math.nan), "sampling.top_p", ("nan",)),
    (sampling(min_p=-0.25), "sampling.min_p", ("-0.25",)),
    (sampling(min_p=math.nan), "sampling.min_p", ("nan",)),
    (sampling(n=0), "sampling.n", ("0", "1 to 16")),
    (sampling(n=17), "sampling.n", ("17",)),
    (stopping(max_tokens=0), "stopping.max_tokens", ("0", "1 and up")),
    (stopping(stop=["x"] * 17), "stopping.stop", ("17", "16")),
    (stopping(stop=[""]), "stopping.stop[0]", ("0 characters",)),
    (stopping(stop=["ok", "y" * 257]), "stopping.stop[1]", ("257", "256")),
    (stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids", ("65", "64")),
    (stopping(stop_token_ids=[401]), "stopping.stop_token_ids[0]", ("401",)),
    (continued(pb.ContinuedChoice(index=1)), "continue_from[0].index", ("1", "choices")),
    (continued(pb.ContinuedChoice(), pb.ContinuedChoice()), "continue_from[1].index", ("once",)),
    (continued(pb.ContinuedChoice(token_ids=[401])), "continue_from[0].token_ids[0]", ("401",)),
    (continued(pb.ContinuedChoice(token_ids=[5]), sampling=pb.Sampling(temperature=1)), "sampling.seed", ("absent",)),
    (
        continued(pb.ContinuedChoice(token_ids=[5, 6, 7]), stopping=pb.Stopping(max_tokens=2)),
        "continue_from[index=0].token_ids",
        ("3 ids", "at most 2"),
    ),
    (continued(pb.ContinuedChoice(token_ids=[5, 2, 7])), "continue_from[index=0].token_ids", ("at most 2",)),
]


async def refusal_of(stub: object, request: pb.GenerateRequest, **kwargs: object) -> grpc.aio.AioRpcError:
    """The same from both calls."""
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await stub.Generate(request, **kwargs)  # type: ignore[attr-defined]
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        await stub.GenerateStream(request, **kwargs).read()  # type: ignore[attr-defined]
    assert unary.value.code() == streamed.value.code()
    assert unary.value.details() == streamed.value.details()
    return streamed.value


def details_of(error: grpc.aio.AioRpcError, kind: type) -> list:
    """Rich details of a kind, through the public library."""

    class Call:
        code = error.code
        details = error.details
        trailing_metadata = staticmethod(lambda: error.trailing_metadata())

    status = rpc_status.from_call(Call)
    found = []
    for detail in status.details:
        if detail.Is(kind.DESCRIPTOR):
            message = kind()
            detail.Unpack(message)
            found.append(message)
    return found


@run_async
async def test_bad_requests() -> None:
    async with rig() as r:
        for request, field, words in REFUSED:
            error = await refusal_of(r.stub, request)
            assert error.code() == INVALID, (field, error)
            assert all(word in error.details() for word in words), (field, words, error.details())
            (bad,) = details_of(error, error_details_pb2.BadRequest)
            assert bad.field_violations[0].field == field, error.details()
        assert not r.core.got(front.Submit)
        # The limits themselves are fine.
        edge = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[1] * 255),
            request_id="r" * 128,
            priority=-100,
            sampling=pb.Sampling(temperature=100, top_p=1, min_p=1, top_k=2**32 - 1, n=16),
            stopping=pb.Stopping(max_tokens=2**32 - 1, stop=["y" * 256] * 16, stop_token_ids=[400] * 64),
        )
        answer = await r.stream(edge)
        assert len(answer.finish) == 16
        (submit,) = r.core.got(front.Submit)
        assert submit.max_tokens == 1  # what the context leaves
        assert submit.sampling.top_k == 0


@run_async
async def test_unknown_and_ambiguous_models() -> None:
    async with rig() as r:
        error = await refusal_of(r.stub, ids_request(model="other"))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert "'other'" in error.details()
        assert "m" in error.details()
        await r.announce(model_state("m"), model_state("second"))
        await r.stream(ids_request(model="second", stopping=pb.Stopping(max_tokens=1)))
        error = await refusal_of(r.stub, ids_request())
        assert error.code() == INVALID
        assert "m, second" in error.details()


@run_async
async def test_prompt_that_no_executor_can_hold() -> None:
    async with rig() as r:
        await r.announce(model_state(max_sequence_tokens=40))
        error = await refusal_of(r.stub, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 40)))
        assert error.code() == INVALID
        assert "40" in error.details()


@pytest.mark.parametrize(
    ("code", "status", "pushback"),
    [
        (front.INVALID_ARGUMENT, INVALID, None),
        (front.ALREADY_EXISTS, grpc.StatusCode.ALREADY_EXISTS, None),
        (front.NOT_FOUND, grpc.StatusCode.NOT_FOUND, None),
        (front.RESOURCE_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED, "2500"),
        (front.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, "2500"),
    ],
)
@run_async
async def test_what_the_core_refuses_is_relayed(code: int, status: grpc.StatusCode, pushback: str | None) -> None:
    async with rig() as r:
        retry = 2.5 if pushback else 0.0
        r.core.answer = lambda submit: front.Rejected(
            stream=submit.stream, code=code, message="no", field="queue", value="9", limit="8", retry_after=retry
        )
        error = await refusal_of(r.stub, text_request())
        assert error.code() == status
        assert error.details() == "no (queue, 9, 8)"
        trailers = dict(tuple(error.trailing_metadata()))
        assert trailers.get("grpc-retry-pushback-ms") == pushback
        if pushback:
            (retry_info,) = details_of(error, error_details_pb2.RetryInfo)
            assert retry_info.retry_delay.ToMilliseconds() == 2500
        assert not r.core.got(front.Cancel)  # it never existed


@run_async
async def test_failure_after_tokens_comes_after_what_was_there() -> None:
    async with rig() as r:
        r.core.auto = False
        call = r.stub.GenerateStream(text_request())
        await call.read()
        await r.core.step(per_row=3)
        (key,) = r.core.runs
        await r.core.send(front.Failed(key[0], front.UNAVAILABLE, "executor lost", 0.5))
        assert list((await call.read()).choices[0].token_ids) == ANSWER_IDS[:3]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(tuple(caught.value.trailing_metadata()))["grpc-retry-pushback-ms"] == "500"
        r.core.runs.clear()


@run_async
async def test_too_many_streams() -> None:
    from scheduler_svc.api.service import ServiceConfig

    async with rig(service=ServiceConfig(max_streams=1)) as r:
        r.core.auto = False
        call = r.stub.GenerateStream(text_request())
        await call.read()
        error = await refusal_of(r.stub, text_request())
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await r.core.until(lambda: not r.core.runs)
