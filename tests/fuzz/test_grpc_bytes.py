"""Bytes that are no request, to every method of the public port and to the port itself: each call ends, by name."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from scheduler_svc.api.server import MAX_REQUEST_BYTES
from tests.api.rig import ANSWER_IDS, Rig, rig, run_async, text_request
from tests.api.slow_client import PREFACE, frame
from tests.fuzz.frames import load, mutated

METHODS = {"Generate": False, "GenerateStream": True, "ListModels": False, "Tokenize": False, "Detokenize": False}
# A mutation may be a request that means something; that nothing ends INTERNAL or UNKNOWN is the point.
FINE = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED"}
SEED = 20260731


async def status_of(r: Rig, method: str, data: bytes) -> str:
    make = r.channel.unary_stream if METHODS[method] else r.channel.unary_unary
    call = make(f"/stepwire.v1.Inference/{method}", lambda raw: raw, lambda raw: raw)(data, timeout=60)
    try:
        if METHODS[method]:
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        assert "Error" not in details, f"{method}, {data.hex()}: {details}"
        assert "Traceback" not in details, f"{method}, {data.hex()}: {details}"
        return error.code().name
    return "OK"


async def throw(r: Rig, seed: int, count: int) -> None:
    rng = random.Random(seed)
    corpus = load("grpc")
    frames = [*corpus, *(mutated(rng, corpus) for _ in range(count))]
    for data in frames:
        for method in METHODS:
            status = await status_of(r, method, data)
            assert status in FINE, f"{method}, {data.hex()}: {status}"
    assert (await r.stream(text_request())).ids[0] == ANSWER_IDS[:12]
    assert r.server.link.up
    assert len(r.core.got(front.Attach)) == 1, "no frame of ours was damaged by what came in"


@run_async
async def test_random_bytes() -> None:
    async with rig() as r:
        await throw(r, SEED, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_random_bytes(seed: int) -> None:
    async def run() -> None:
        async with asyncio.timeout(110), rig() as r:
            await throw(r, seed, 600)

    asyncio.run(run())


@run_async
async def test_what_is_not_a_message_is_an_invalid_argument() -> None:
    async with rig() as r:
        for method in METHODS:
            for data in (b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\xff" * 40, b"\x32\x05\x0d\x00"):
                if method == "ListModels" and data == b"\x0a\x02\xff\xfe":
                    continue  # a field that it does not know
                assert await status_of(r, method, data) == "INVALID_ARGUMENT", (method, data)


@run_async
async def test_messages_that_are_too_large() -> None:
    async with rig(max_receive_bytes=100_000) as r:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.stub.Generate(text_request("x" * 200_000))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await r.stub.Tokenize(pb.TokenizeRequest(text="fox"))).ids


@run_async
async def test_messages_of_empty_parts() -> None:
    """Two bytes a part: the default limit is what keeps their parsing short."""
    async with rig() as r:
        prompt = pb.GenerateRequest(text="fox").SerializeToString()
        parts = b"\x42\x00" * (MAX_REQUEST_BYTES // 2 - len(prompt))
        assert await status_of(r, "Generate", prompt + parts) == "INVALID_ARGUMENT"
        assert await status_of(r, "Generate", prompt + 2 * parts) == "RESOURCE_EXHAUSTED"


@run_async
async def test_bytes_that_are_not_grpc() -> None:
    """Raw bytes, and HTTP/2 frames that make no sense: the connection's loss, nobody else's."""
    rng = random.Random(SEED)
    async with rig() as r:
        for i in range(30):
            _, writer = await asyncio.open_connection("127.0.0.1", r.server.port)
            if i % 3 == 0:
                writer.write(rng.randbytes(rng.choice([1, 24, 1000, 70_000])))
            else:
                writer.write(PREFACE)
                for _ in range(20):
                    payload = rng.randbytes(rng.choice([0, 4, 5, 8, 200]))
                    writer.write(frame(rng.randrange(12), rng.randrange(256), rng.randrange(9), payload))
            writer.close()
        assert (await r.stream(text_request())).ids[0] == ANSWER_IDS[:12]
