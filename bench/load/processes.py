"""Servers of a comparison: started in a session of their own, ended by pid, paused while another is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

READY_POLL = 0.25  # seconds between readiness probes


class ServerProcess:
    """One server and all its children (its process group)."""

    def __init__(self, name: str, command: list[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        self._output = log.open("wb")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=dict(os.environ) | dict(env or {}),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self, probe: Callable[[], bool], timeout: float) -> None:
        """Polls ``probe`` until it is true. Raises RuntimeError with the log's end when the server dies or is late."""
        deadline = time.monotonic() + timeout
        while not probe():
            if self.process.poll() is not None or time.monotonic() > deadline:
                state = "is late" if self.process.returncode is None else f"ended with {self.process.returncode}"
                raise RuntimeError(f"{self.name} {state}; the end of {self.log}:\n{self.tail()}")
            time.sleep(READY_POLL)

    def tail(self, size: int = 3000) -> str:
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def pause(self) -> None:
        """Takes it off the processor: idle servers of some engines spin."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def stop(self, grace: float = 15.0) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
            os.killpg(self.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def http_ready(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2) as response:
        return bool(response.status == 200)
    return False


def stop_on_sigterm() -> None:
    """SIGTERM unwinds a bench as Ctrl-C does, so that what it started is stopped too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
