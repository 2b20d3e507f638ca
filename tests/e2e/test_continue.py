"""Continuing from the first k tokens: the same ids, and the text joins byte for byte."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from tests.e2e.harness import Cluster
from tests.e2e.streams import Answer, common_requests, continuation, generate, stream
from tests.e2e.verify import settled


def test_from_every_seam(shared: Cluster, alone: list[Answer]) -> None:
    messages = common_requests()
    cases = []
    for message, whole in zip(messages, alone, strict=True):
        seams = [(k, chars) for k, chars in whole.seams if 0 < k < len(whole.ids)]
        cases += [(message, whole, k, chars) for k, chars in seams[:: max(1, len(seams) // 5)]]
    assert len({k for _, _, k, _ in cases}) >= 4, "several k"
    answers = generate(shared.address, [continuation(message, whole, k) for message, whole, k, _ in cases])
    for (_, whole, k, chars), answer in zip(cases, answers, strict=True):
        assert whole.ids[:k] + answer.ids == whole.ids, f"from {k}"
        assert whole.text[:chars] + answer.text == whole.text, f"from {k}: {whole.text[:chars]!r} + {answer.text!r}"
        assert answer.reason == whole.reason
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(whole.ids), "usage counts all of the choice's tokens"
    settled(shared)


def test_continuation_of_a_live_request_takes_its_place(shared: Cluster, alone: list[Answer]) -> None:
    """The first stream ends with a status of its own; the second has the rest, and all tokens are the same."""
    message, whole = common_requests()[0], alone[0]
    message.request_id = "fenced"
    rest_of_it = continuation(message, whole, 4)
    message.stopping.max_tokens = 4000  # it runs until its place is taken
    fenced, rest = asyncio.run(continue_while_it_runs(shared.address, message, rest_of_it))
    assert fenced in (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
    assert (whole.ids[:4] + rest.ids)[: len(whole.ids)] == whole.ids
    settled(shared)


async def continue_while_it_runs(
    address: str, message: pb.GenerateRequest, continued: pb.GenerateRequest
) -> tuple[grpc.StatusCode, Answer]:
    """(status of the first stream, all of the second), the second sent once the first had a token."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        first = stream(stub, message)
        await anext(first)
        *_, answer = [answer async for answer in stream(stub, continued)]
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in first:
                pass
        return failure.value.code(), answer
