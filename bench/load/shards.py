"""Runs a load in one process, or in several where one would lag behind the server."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.load.figures import figures, spread
from bench.load.lag import LagProbe
from bench.load.pacing import Driver, closed_loop, open_loop
from bench.load.record import Record, Request

START_DELAY = 0.2  # seconds from "go" to the first send: every shard is connected and waiting by then


@dataclass(slots=True)
class Shard:
    """One process' part. ``concurrency`` 0: requests go at their ``send_at``."""

    make_driver: Callable[[], Driver]  # picklable: called in the shard's process
    requests: list[Request]
    concurrency: int
    warmup: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class ShardResult:
    records: list[Record]
    lags: list[float]
    cpu: float
    wall: float


async def _run(shard: Shard, start: float) -> ShardResult:
    driver = shard.make_driver()
    try:
        if shard.warmup:
            await closed_loop(driver, shard.warmup, shard.concurrency or len(shard.warmup))
        begin = max(start, time.perf_counter())
        async with LagProbe() as probe:
            if shard.concurrency:
                await asyncio.sleep(max(0.0, begin - time.perf_counter()))
                records = await closed_loop(driver, shard.requests, shard.concurrency)
            else:
                records = await open_loop(driver, shard.requests, begin)
        return ShardResult(records, probe.lags, probe.cpu, probe.wall)
    finally:
        await driver.close()


def _run_blocking(shard: Shard, start: float) -> ShardResult:
    return asyncio.run(_run(shard, start))


def split(shard: Shard, parts: int) -> list[Shard]:
    """Deals requests and concurrency out to ``parts`` shards as evenly as they go; the warm-up stays with the first."""
    parts = max(1, min(parts, len(shard.requests), shard.concurrency or len(shard.requests)))
    shares = [shard.concurrency // parts + (i < shard.concurrency % parts) for i in range(parts)]
    shards = [Shard(shard.make_driver, shard.requests[i::parts], shares[i]) for i in range(parts)]
    shards[0].warmup = shard.warmup
    return shards


def run_load(shard: Shard, processes: int = 1) -> tuple[list[Record], dict[str, Any]]:
    """Runs the load; returns the records and their figures, the generator's own lag among them."""
    first, *others = split(shard, processes)
    if not others:
        results = [_run_blocking(first, 0.0)]
    else:
        if first.warmup:  # in a load of its own, so that all shards start the measured part together
            run_load(Shard(shard.make_driver, first.warmup, shard.concurrency or len(first.warmup)))
            first.warmup = []
        with ProcessPoolExecutor(1 + len(others), mp_context=mp.get_context("spawn")) as pool:
            list(pool.map(_import_everything, range(1 + len(others))))
            start = time.perf_counter() + START_DELAY
            results = list(pool.map(_run_blocking, [first, *others], [start] * (1 + len(others))))
    records = sorted((r for result in results for r in result.records), key=lambda record: record.index)
    out = figures(records)
    out["generator"] = {
        "processes": len(results),
        "loop_lag_ms": spread(lag for result in results for lag in result.lags),
        "cpu_share": max(result.cpu / result.wall for result in results),
    }
    return records, out


def _import_everything(_: int) -> None:
    """Makes a pool process pay its imports before the clock starts."""
