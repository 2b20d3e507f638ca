"""For all tests: none depends on chance or on the test before it; whatever one started is gone when the run ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PR_SET_CHILD_SUBREAPER = 36

with contextlib.suppress(ImportError):  # a GPU machine may be without it
    from hypothesis import HealthCheck, settings

    # The same examples every time, however long each takes: the machine may be busy.
    settings.register_profile("stepwire", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("stepwire")


def pytest_configure(config: pytest.Config) -> None:
    """Children of a service that was killed become ours, so that they are seen (and ended) too."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A service's ``main`` that a test called has set up logging for a process of its own."""
    loggers = [logging.getLogger(name) for name in ("", "scheduler_svc", "executor_svc")]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


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


def _services() -> dict[int, str]:
    return {pid: line for pid, line in _descendants().items() if "_svc" in line}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A leaked service is a failure of the run, named, and ended by its pid. What was just killed has time to go."""
    deadline = time.monotonic() + 5.0
    while (leaked := _services()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid, line in leaked.items():
        print(f"\nleaked process {pid}: {line}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if leaked and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
