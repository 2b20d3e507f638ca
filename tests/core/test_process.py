"""``python -m scheduler_svc.core`` as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_core_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """Nobody is attached, so nothing but the signal itself can end its wait."""
    command = [sys.executable, "-m", "scheduler_svc.core", "--listen", "tcp://127.0.0.1:0"]
    core = subprocess.Popen([*command, "--front", f"ipc://{tmp_path}/f"], stderr=subprocess.PIPE, text=True)
    assert core.stderr is not None
    try:
        while "core listens" not in (line := core.stderr.readline()):
            assert line, "it ended before it listened"
        core.send_signal(number)
        assert core.wait(15) == 0
    finally:
        core.kill()
        core.wait()
        core.stderr.close()


def test_limits_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "limits").write_text('{"default": {"max_requets": 1}}')
    command = [sys.executable, "-m", "scheduler_svc.core", "--listen", "tcp://127.0.0.1:0"]
    command += ["--front", f"ipc://{tmp_path}/f", "--tenant-limits", str(tmp_path / "limits")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "max_requets" in done.stderr


def test_limits_that_change_are_read_again(tmp_path: Path) -> None:
    limits = tmp_path / "limits"
    limits.write_text("{}")
    command = [sys.executable, "-m", "scheduler_svc.core", "--listen", "tcp://127.0.0.1:0"]
    command += ["--front", f"ipc://{tmp_path}/f", "--tenant-limits", str(limits)]
    core = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert core.stderr is not None
    try:
        for text, said in (
            (None, "core listens"),
            ('{"default": {"max_requests": 1}}', "file read again"),
            ('{"default": 1}', "file not taken, the former one holds"),
            ('{"default": {"max_requests": 2}}', "file read again"),
        ):
            if text is not None:
                (tmp_path / "new").write_text(text)
                (tmp_path / "new").rename(limits)
            while said not in (line := core.stderr.readline()):
                assert line, f"it ended without {said!r}"
        assert core.poll() is None
    finally:
        core.kill()
        core.wait()
        core.stderr.close()
