"""Clients that never read: what they cost is bounded, nobody else notices, and each is ended after the stated time."""

from __future__ import annotations

import asyncio
import time

import pytest

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from scheduler_svc.api.service import ServiceConfig
from tests.api.rig import ANSWER_IDS, Rig, rig, run_async, text_request
from tests.api.slow_client import SlowClient
from tests.api.test_lifecycle import eventually

SECONDS = 1.0


def resident() -> int:
    """Bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


async def never_reading(r: Rig, connections: int, streams: int, max_tokens: int) -> float:
    """Opens ``connections * streams`` calls that read nothing; returns the seconds until the last of them was ended."""
    clients = [await asyncio.to_thread(SlowClient, r.server.port) for _ in range(connections)]
    try:
        began = time.monotonic()
        opened = [
            {client.open(text_request(stopping=pb.Stopping(max_tokens=max_tokens))) for _ in range(streams)}
            for client in clients
        ]
        # Meanwhile others are served as ever.
        for _ in range(3):
            assert (await r.stream(text_request())).ids[0] == ANSWER_IDS[:12]
        await r.core.until(lambda: len(r.core.got(front.Submit)) >= connections * streams)
        count = connections * streams
        await eventually(lambda: r.server.metrics.slow_readers._value.get() == count)
        took = time.monotonic() - began
        assert r.server.service.open_calls == 0
        assert not r.server.link.open
        await r.core.until(lambda: not r.core.runs)
        # The status is the next thing that one sees who reads after all (gRPC sends it after what was written).
        await asyncio.gather(
            *(asyncio.to_thread(client.ends, ids) for client, ids in zip(clients, opened, strict=True))
        )
        assert (await r.stream(text_request())).ids[0] == ANSWER_IDS[:12]
        return took
    finally:
        for client in clients:
            client.close()


@run_async
async def test_clients_that_never_read() -> None:
    """Both kinds: an answer that is all there and cannot be handed over, and one that grows."""
    for max_tokens, slow_tokens in ((200, 10_000), (200, 50)):
        async with rig(service=ServiceConfig(slow_seconds=SECONDS, slow_tokens=slow_tokens)) as r:
            took = await never_reading(r, 2, 2, max_tokens)
            assert took >= SECONDS


@pytest.mark.slow
def test_200_clients_that_never_read() -> None:
    async def run() -> None:
        async with asyncio.timeout(100), rig(service=ServiceConfig(slow_seconds=2.0, slow_tokens=50)) as r:
            await never_reading(r, 1, 2, 200)  # what a first time costs
            r.server.metrics.slow_readers._value.set(0)
            r.core.received.clear()
            before = resident()
            took = await never_reading(r, 50, 4, 200)
            grown = resident() - before
            print(f"200 clients: ended after {took:.1f} s, {grown / 2**20:.1f} MiB")
            assert grown < 64 * 2**20

    asyncio.run(run())
