"""The generator's own lag: a figure from a generator that could not keep up describes the generator."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class LagProbe:
    """Wakes every ``period`` seconds and notes how late it woke; also the CPU seconds this process used."""

    period: float = 0.02
    lags: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagProbe:
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._probe())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._task is not None:
            self._task.cancel()
        self.wall = time.perf_counter() - self.wall
        self.cpu = time.process_time() - self.cpu

    async def _probe(self) -> None:
        while True:
            due = time.perf_counter() + self.period
            await asyncio.sleep(self.period)
            self.lags.append(time.perf_counter() - due)
