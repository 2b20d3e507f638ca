"""A child's pulse: a pipe on which its event loop writes a byte now and then. A process that lives but does not turn
(stopped, stuck) has none.

Nor has one that computes while it holds the interpreter's lock (a tokenizer of a quarter million tokens is being read),
the longer the busier the machine is. ``computing`` tells the two apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

INTERVAL = 0.25  # seconds between two beats
START_IDLE = 3.0  # seconds
_OVERSLEPT = 0.5  # seconds: so late means that the watcher itself stood still


async def beat(descriptor: int) -> None:
    """In the child, for as long as its loop turns. Ends when nobody listens any more."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BrokenPipeError):
        while True:
            with contextlib.suppress(BlockingIOError):  # the watcher stands still: it will find what is there
                os.write(descriptor, b".")
            await asyncio.sleep(INTERVAL)


async def computing(pid: int) -> bool:
    """Whether a thread of the process runs, waits for a CPU or a disk, or has run within the last moments; True as well
    where nothing says so."""
    before = _threads(pid)
    await asyncio.sleep(INTERVAL)
    after = _threads(pid)
    return not after or any(state in "RD" for state, _ in after) or sum(t for _, t in after) > sum(t for _, t in before)


async def until_idle(pid: int) -> None:
    """Returns when the process has not computed for `START_IDLE` seconds on end. At its start it has nothing to wait
    for but a CPU and a disk: then it is stopped, or stuck."""
    idle = 0
    while idle * INTERVAL < START_IDLE:
        idle = 0 if await computing(pid) else idle + 1


def _threads(pid: int) -> list[tuple[str, int]]:
    """Of each thread its state and the CPU time that it had, in ticks."""
    threads = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            state, *fields = stat.read_text().rpartition(")")[2].split()
            threads.append((state, int(fields[10]) + int(fields[11])))  # utime and stime
    return threads


async def first_of(*waits: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """The number of the one that returned first, and what it returned; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        number = min(tasks.index(task) for task in done)
        return number, tasks[number].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Pulse:
    """In the parent: the pipe's reading end, and when something last came out of it."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        os.set_blocking(self._read, False)
        self._heard = time.monotonic()
        self._beats = 0
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._read, self._on_readable)

    def started(self) -> None:
        """The child has the writing end: the parent's is closed."""
        os.close(self.write)
        self.write = -1

    async def until_silent(self, startup: float, silence: float) -> float:
        """Returns for how long nothing came, once that is more than ``silence`` seconds (``startup``, before the first
        beat)."""
        while True:
            limit = silence if self._beats else startup
            due = self._heard + limit
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._news.wait()
                continue
            now = time.monotonic()
            if now - due > _OVERSLEPT:
                self._heard = now - limit + _OVERSLEPT  # what came meanwhile is still to be read
            elif now >= self._heard + limit:
                return now - self._heard

    async def until_first_beat(self) -> None:
        while not self._beats:
            self._news.clear()
            await self._news.wait()

    @property
    def silent(self) -> float:
        """Seconds since something came."""
        return time.monotonic() - self._heard

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        if self.write >= 0:
            os.close(self.write)

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(self._read, 4096):  # the child ended
                asyncio.get_running_loop().remove_reader(self._read)
                return
            self._heard = time.monotonic()
            self._beats += 1
            self._news.set()
