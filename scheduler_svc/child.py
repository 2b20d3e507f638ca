"""One supervised process: start, reap, start again with growing pauses. It never outlives the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_svc.pulse import Pulse, computing, first_of, until_idle

log = logging.getLogger(__name__)

USAGE_ERROR = 2  # argparse's exit status: at the first start, so every start would end this way
_PR_SET_PDEATHSIG = 1
# Looked up before any fork: the child must not load libraries.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


@dataclass(slots=True)
class Backoff:
    """Pauses between starts: none after a child that ran `stable` seconds, then `first`, doubled up to `most`."""

    first: float = 0.1
    most: float = 10.0
    stable: float = 10.0
    failures: int = 0  # in a row

    def after(self, uptime: float) -> float:
        """Seconds to wait before the next start of a child that ran `uptime` seconds."""
        if uptime >= self.stable:
            self.failures = 0
        self.failures += 1
        if self.failures == 1:
            return 0.0
        return min(self.first * 2.0 ** min(self.failures - 2, 32), self.most)


def die_with_parent(parent: int) -> Callable[[], None]:
    """For preexec_fn: the kernel kills this process when `parent` (the thread that forked it) ends."""

    def preexec() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return preexec


@dataclass(frozen=True, slots=True)
class Watch:
    """Of a child's pulse (pulse.py), in seconds."""

    startup: float = 120.0  # until the first beat, while it computes; it is frozen sooner where it does not (pulse.py)
    silence: float = 3.5  # then it counts as frozen, unless it computes: known, and dead, within 4
    busy: float = 30.0  # ... for no longer than this


@dataclass(frozen=True, slots=True)
class _Standby:
    process: asyncio.subprocess.Process
    pipe: int  # the writing end

    def release(self) -> None:
        """Its turn has come."""
        with contextlib.suppress(BrokenPipeError):  # it ended just now, which the caller finds as of any process
            os.write(self.pipe, b"!")
        self.close()

    def close(self) -> None:
        os.close(self.pipe)


class Child:
    """`command` is started at once and again whenever it ends, until ``stop`` was called.

    With a ``watch`` it gets ``--pulse-fd N``, and is killed, and so started again, when it has no pulse.
    ``descriptors`` are open in every one of its processes.

    With ``standby_after``, which goes with no ``watch``, another process is started so many seconds after a start, with
    ``--standby-fd N``: it gets ready and waits (standby.py), so that the next start takes no time.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        backoff: Backoff | None = None,
        watch: Watch | None = None,
        descriptors: Sequence[int] = (),
        standby_after: float | None = None,
    ) -> None:
        self.name = name
        self.starts = 0
        self.status: int | None = None  # of the last end: exit status, or minus the signal
        self.was_killed = False
        self._command = list(command)
        self._backoff = backoff or Backoff()
        self._watch = watch
        self._descriptors = tuple(descriptors)
        assert watch is None or standby_after is None
        self._standby_after = standby_after
        self._standby: _Standby | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self.running = asyncio.Event()  # a process is there ...
        self.gone = asyncio.Event()  # ... or none is
        self.gone.set()
        self.ended = asyncio.Event()  # for good

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two starts."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Until stopped, or until the first start ends with a usage error. Reaps the old process before a new start."""
        try:
            while not self._stopping.is_set():
                uptime = await self._run_once()
                if self._stopping.is_set() or (self.status == USAGE_ERROR and self.starts == 1):
                    break
                delay = self._backoff.after(uptime)
                log.warning(
                    "child ended, starting it again",
                    extra={"child": self.name, "status": self.status, "uptime": round(uptime, 3), "delay": delay},
                )
                await self._pause(delay)
        finally:
            await self._dismiss_standby()
            self.ended.set()

    async def _run_once(self) -> float:
        """One process from start to reaping; its uptime in seconds."""
        started = time.monotonic()
        self.starts += 1
        pulse = Pulse() if self._watch is not None else None
        try:
            process = await self._begin(pulse)
        except (OSError, subprocess.SubprocessError) as error:  # no memory or process left: try again later
            log.error("child cannot be started", extra={"child": self.name, "error": str(error)})
            self.status = None
            if pulse is not None:
                pulse.close()
            return 0.0
        self._process = process
        self.gone.clear()
        self.running.set()
        log.info("child started", extra={"child": self.name, "child_pid": process.pid, "start": self.starts})
        if self._stopping.is_set():
            process.terminate()
        tasks = [asyncio.create_task(self._kill_when_silent(pulse))] if pulse is not None else []
        if self._standby_after is not None:
            tasks.append(asyncio.create_task(self._have_standby(self._standby_after)))
        try:
            self.status = await process.wait()
        finally:
            for task in tasks:
                task.cancel()
            self._process = None
            self.running.clear()
            self.gone.set()
            if process.returncode is None:  # the supervisor itself is being torn down
                process.kill()
                await process.wait()
        return time.monotonic() - started

    async def _begin(self, pulse: Pulse | None) -> asyncio.subprocess.Process:
        """A new process, or the one that stands by. Raises OSError or SubprocessError."""
        standby, self._standby = self._standby, None
        if standby is not None:
            if standby.process.returncode is None:
                standby.release()
                return standby.process
            standby.close()
        if pulse is None:
            return await self._spawn((), ())
        return await self._spawn(("--pulse-fd", str(pulse.write)), (pulse.write,))

    async def _spawn(self, flags: Sequence[str], descriptors: Sequence[int]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            *flags,
            pass_fds=(*self._descriptors, *descriptors),
            stdin=asyncio.subprocess.DEVNULL,
            # A group of its own: Ctrl-C reaches the supervisor alone, which then stops its children in order.
            process_group=0,
            preexec_fn=die_with_parent(os.getpid()),
        )

    async def _have_standby(self, after: float) -> None:
        """Keeps one there while the process runs."""
        while True:
            await asyncio.sleep(after)
            if self._stopping.is_set():
                return
            read, write = os.pipe()
            try:
                process = await self._spawn(("--standby-fd", str(read)), (read,))
            except (OSError, subprocess.SubprocessError) as error:
                os.close(write)
                log.error("standby cannot be started", extra={"child": self.name, "error": str(error)})
                continue
            except asyncio.CancelledError:
                os.close(write)  # what may have been started ends by itself
                raise
            finally:
                os.close(read)
            self._standby = _Standby(process, write)
            await process.wait()
            log.warning("standby ended", extra={"child": self.name, "status": process.returncode})
            self._standby.close()
            self._standby = None

    async def _dismiss_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.close()
            with contextlib.suppress(ProcessLookupError):
                standby.process.kill()
            await standby.process.wait()

    async def _kill_when_silent(self, pulse: Pulse) -> None:
        pulse.started()
        try:
            silent = await self._until_frozen(pulse)
            log.error("child is frozen, killing it", extra={"child": self.name, "silent": round(silent, 3)})
            self.signal(signal.SIGKILL)
        finally:
            pulse.close()

    async def _until_frozen(self, pulse: Pulse) -> float:
        """Returns for how long it has been silent."""
        assert self._watch is not None
        watch = self._watch
        if self._process is not None:
            idle = until_idle(self._process.pid)
            first, _ = await first_of(pulse.until_first_beat(), idle, asyncio.sleep(watch.startup))
            if first != 0:
                return pulse.silent
        while True:
            silent = await pulse.until_silent(watch.startup, watch.silence)
            while silent > watch.silence:
                busy = self._process is not None and await computing(self._process.pid)
                silent = pulse.silent
                if silent > watch.silence and (silent > watch.busy or not busy):
                    return silent

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def signal(self, number: int) -> None:
        """Send a signal to the running process, if there is one."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """For a process that does not react: SIGKILL. It is started again unless it was stopped."""
        self.was_killed = True
        self.signal(signal.SIGKILL)

    def stop(self) -> None:
        """Ask the process to end (SIGTERM), and start it no more."""
        self._stopping.set()
        self.signal(signal.SIGTERM)
