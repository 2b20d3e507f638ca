"""Sends requests at a pace: a number in flight, or at given times whatever the answers do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol

from bench.load.record import Record, Request


class Driver(Protocol):
    """A server reached by one protocol; ``due`` is when the request should have been sent."""

    async def run(self, request: Request, due: float) -> Record: ...

    async def close(self) -> None: ...


async def closed_loop(driver: Driver, requests: list[Request], concurrency: int) -> list[Record]:
    """Keeps ``concurrency`` requests in flight until all were sent."""
    queue: Iterator[Request] = iter(requests)

    records: list[Record] = []

    async def client() -> None:
        for request in queue:
            records.append(await driver.run(request, time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(min(concurrency, len(requests)))))
    return sorted(records, key=lambda record: record.index)


async def open_loop(driver: Driver, requests: list[Request], start: float) -> list[Record]:
    """Sends each request at ``start + send_at``; late answers do not slow it down."""

    async def send(request: Request) -> Record:
        due = start + request.send_at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await driver.run(request, due)

    return list(await asyncio.gather(*(send(request) for request in requests)))
