"""The scheduler service's first process: one core, N API workers, and their order of life and death.

::

    start:  core, then the API workers (they wait for it)
    dies:   it is reaped, then started again (child.py). Open streams survive a core: the API workers submit them again
    frozen: a core that says nothing for too long is killed, and so dies; an API worker without a pulse, too (pulse.py)
    stop:   SIGTERM (or SIGINT): API workers first, which finish their streams; then the core. A second one hurries

Exit status: 0 after a clean stop; 1 when a child had to be killed or ended badly while stopping; 2 when a child refused
its flags.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import zmq.asyncio

from scheduler_svc.child import USAGE_ERROR, Child
from scheduler_svc.core_watch import until_silent
from scheduler_svc.pulse import first_of, until_idle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds."""

    drain: float = 60.0  # for the API workers to finish their streams
    core_stop: float = 10.0  # for the core after that
    hurry: float = 3.0  # after a second signal, before SIGKILL
    core_startup: float = 120.0  # until a new core's first word, while it computes (pulse.py)
    core_silence: float = 4.0  # then it counts as frozen: its loop says something four times a second


class Supervisor:
    """`front`: the ipc address the core answers on; "" where it is not watched."""

    def __init__(
        self, core: Child, workers: Sequence[Child], front: str = "", patience: Patience | None = None
    ) -> None:
        self._core = core
        self._workers = list(workers)
        self._front = front
        self._patience = patience or Patience()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Until a signal, or a child that refuses its flags. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        children = [self._core, *self._workers]
        tasks = [asyncio.create_task(child.run(), name=child.name) for child in children]
        watch = asyncio.create_task(self._watch_core()) if self._front else None
        try:
            await self._until_stopped(children)
            await self._stop_in_order()
            return self._exit_status(children)
        finally:
            for task in [*tasks, *([watch] if watch else [])]:
                task.cancel()
            await asyncio.gather(*tasks, *([watch] if watch else []), return_exceptions=True)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def on_signal(self) -> None:
        if self._stop.is_set() and not self._hurry.is_set():
            log.warning("stopping in a hurry")
            self._hurry.set()
        self._stop.set()

    async def _until_stopped(self, children: Iterable[Child]) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._stop, *(child.ended for child in children))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        for child in children:
            if child.ended.is_set():
                log.error("child refused its flags", extra={"child": child.name, "status": child.status})

    async def _stop_in_order(self) -> None:
        log.info("stopping", extra={"workers": len(self._workers)})
        await self._stop_children(self._workers, self._patience.drain)
        await self._stop_children([self._core], self._patience.core_stop)
        log.info("stopped")

    async def _stop_children(self, children: Sequence[Child], patience: float) -> None:
        """SIGTERM, then wait; SIGKILL after `patience` seconds, or soon after a second signal."""
        for child in children:
            child.stop()
        ended = asyncio.create_task(_all_ended(children))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((ended, hurry), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if self._hurry.is_set() and not ended.done():
            for child in children:
                child.signal(signal.SIGTERM)  # a service may have a quicker way of its own
            await asyncio.wait((ended,), timeout=self._patience.hurry)
        hurry.cancel()
        for child in children:
            if not child.ended.is_set():
                log.error("child did not stop in time, killing it", extra={"child": child.name})
                child.kill()
        await ended

    def _exit_status(self, children: Iterable[Child]) -> int:
        if any(child.status == USAGE_ERROR for child in children):
            return USAGE_ERROR
        clean = all(child.status in (0, -signal.SIGTERM, None) and not child.was_killed for child in children)
        return 0 if clean else 1

    async def _watch_core(self) -> None:
        core, patience = self._core, self._patience
        with zmq.asyncio.Context() as context:
            while True:
                await core.running.wait()
                heard = asyncio.Event()
                watch = until_silent(
                    context,
                    self._front,
                    startup=patience.core_startup,
                    silence=patience.core_silence,
                    heard_first=heard,
                )
                first, silent = await first_of(core.gone.wait(), watch, _stopped_at_start(core, heard))
                if first == 0:
                    continue
                if core.stopping:
                    return  # it has only its sockets left to close
                log.error("the core is frozen, killing it", extra={"silent": round(silent, 3)})
                core.signal(signal.SIGKILL)
                await core.gone.wait()


async def _stopped_at_start(core: Child, heard: asyncio.Event) -> float:
    """Returns when it stands still before its first word, and after how many seconds; else never."""
    pid, started = core.pid, time.monotonic()
    if pid is None or (await first_of(heard.wait(), until_idle(pid)))[0] == 0:
        await asyncio.Event().wait()
    return time.monotonic() - started


async def _all_ended(children: Iterable[Child]) -> None:
    for child in children:
        await child.ended.wait()
