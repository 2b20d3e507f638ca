"""One process under test: its log, what it said, and its certain end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.02  # seconds between looks at a file or at /proc; every wait ends on an event, never on a time alone
TIMEOUT = 120.0
START_TIMEOUT = 300.0  # an executor's: the first one after a change of the kernels compiles them


class Process:
    """``python -m MODULE ARGS``, in a session of its own; standard output and error go to ``log``.
    ``prefix``: a command that becomes this one by exec."""

    def __init__(
        self, name: str, args: list[str], log: Path, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self.name, self.log, self.args = name, log, args
        self._told = False
        self._output = log.open("ab")
        self._output.write(f"--- {' '.join(args)}\n".encode())
        self._output.flush()
        self.started_at = self.log.stat().st_size  # log bytes of earlier processes of this name
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, *args],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=dict(os.environ) | (env or {}),
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def text(self) -> str:
        """What this process said so far (not earlier ones with the same log)."""
        return self.log.read_bytes()[self.started_at :].decode(errors="replace")

    def wait_log(self, pattern: str, timeout: float = TIMEOUT) -> re.Match[str]:
        """Waits for a line that matches; fails when the process ends without it."""
        for _ in bounded(timeout, lambda: f"{self.name} never said {pattern!r}:\n{self.text()[-4000:]}"):
            alive = self.alive
            if match := re.search(pattern, self.text(), re.MULTILINE):
                return match
            assert alive, f"{self.name} ended with {self.popen.returncode} before {pattern!r}:\n{self.text()[-4000:]}"
        raise AssertionError

    def terminate(self) -> None:
        """SIGTERM, once: a second one means "at once" to the services."""
        if self.alive and not self._told:
            self._told = True
            self.popen.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = TIMEOUT) -> int:
        return self.popen.wait(timeout)

    def stop(self, grace: float = 30.0) -> None:
        """SIGTERM to the process, then SIGKILL to what is left of its session."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(grace)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()
        self._output.close()


def bounded(timeout: float, message: object, poll: float = POLL) -> Iterator[None]:
    """Yields now and then until ``timeout`` seconds have passed, then fails with ``message`` (called if callable)."""
    deadline = time.monotonic() + timeout
    while True:
        yield
        if time.monotonic() > deadline:
            raise AssertionError(message() if callable(message) else message)
        time.sleep(poll)


def children(pid: int) -> dict[int, str]:
    """pid -> command line of the live children of ``pid``."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def name_of(pid: int) -> str:
    """As the process calls itself; "" where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def gone(pid: int) -> bool:
    """It ended, and with the last of its threads all that it held: ports, locks, files that were unlinked."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    return True
