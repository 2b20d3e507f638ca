"""For all tests: whatever a test started is gone when the run ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

import pytest

PR_SET_CHILD_SUBREAPER = 36


def pytest_configure(config: pytest.Config) -> None:
    """Children of a service that was killed become ours, so that they are seen (and ended) too."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants() -> dict[int, str]:
    """pid -> command line of every process below this one."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
                    lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()

    def below(pid: int) -> bool:
        while pid > 1:
            pid = parents.get(pid, 0)
            if pid == os.getpid():
                return True
        return False

    return {pid: line for pid, line in lines.items() if below(pid)}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A leaked service is a failure of the run, named, and ended by its pid."""
    leaked = {pid: line for pid, line in _descendants().items() if "_svc" in line}
    for pid, line in leaked.items():
        print(f"\nleaked process {pid}: {line}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if leaked and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
