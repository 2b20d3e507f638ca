"""The command line of the scheduler service: what goes to whom, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc import __main__ as service
from scheduler_svc.api import __main__ as api


def options(parse: argparse.ArgumentParser) -> dict[str, bool]:
    """Long option -> whether it takes a value."""
    return {
        name: action.nargs != 0
        for action in parse._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }


def test_every_flag_of_the_api_workers_can_be_given() -> None:
    set_by_the_supervisor = {
        "--front",
        "--listen",
        "--worker-name",
        "--reuse-port",
        "--metrics",
        "--admin",
        "--pulse-fd",
    }
    shared = {"--log-level", "--log-format"}
    wanted = {
        name: value for name, value in options(api.parser()).items() if name not in set_by_the_supervisor | shared
    }
    assert {name: metavar is not None for name, metavar in service.API_FLAGS.items()} == wanted


def test_the_drain_defaults_are_those_of_the_api_workers() -> None:
    defaults = api.parser().parse_args(["--front", "ipc:///x"])
    assert (defaults.leave_grace, defaults.drain_limit) == (service.DEFAULT_LEAVE_GRACE, service.DEFAULT_DRAIN_LIMIT)
    assert service.patience(service.parser().parse_args([])).drain > defaults.leave_grace + defaults.drain_limit


def test_flags_go_where_they_belong() -> None:
    args, rest = service.parser().parse_known_args(
        ["--depth", "3", "--listen", "127.0.0.1:1", "--api-workers", "2", "--metrics", "127.0.0.1:9000",
         "--drain-limit", "7", "--no-reflection", "--log-format", "json", "--executors", "tcp://127.0.0.1:2"]
    )  # fmt: skip
    core = service.core_command(args, "ipc:///f", rest, 9)
    assert core[1:] == [
        "-m", "scheduler_svc.core", "--listen", "tcp://127.0.0.1:2", "--front", "ipc:///f",
        "--ledger-fd", "9", "--log-level", "info", "--log-format", "json", "--depth", "3",
    ]  # fmt: skip
    worker = api.parser().parse_args(service.worker_command(args, "ipc:///f", 1)[3:])
    assert (worker.worker_name, worker.listen, worker.reuse_port) == ("api-1", "127.0.0.1:1", True)
    assert (worker.metrics, worker.drain_limit, worker.no_reflection) == ("127.0.0.1:9001", 7.0, True)
    assert service.patience(args).drain == 7.0 + 2.0 + service.DRAIN_MARGIN


def test_the_admin_service_is_the_first_workers_and_off_by_default() -> None:
    args, _ = service.parser().parse_known_args(["--admin", "127.0.0.1:7", "--admin-key-file", "k", "--api-keys", "f"])
    first, second = (api.parser().parse_args(service.worker_command(args, "ipc:///f", i)[3:]) for i in (0, 1))
    assert (first.admin, second.admin) == ("127.0.0.1:7", None)
    assert (str(first.admin_key_file), str(second.api_keys)) == ("k", "f")
    assert (
        api.parser().parse_args(service.worker_command(service.parser().parse_args([]), "ipc:///f", 0)[3:]).admin
        is None
    )


def test_one_worker_does_not_share_its_port() -> None:
    args = service.parser().parse_args([])
    assert "--reuse-port" not in service.worker_command(args, "ipc:///f", 0)


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scheduler_svc", *flags], capture_output=True, text=True, timeout=60, check=False
    )


def test_an_address_in_use_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as API workers bind
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("--listen", address, "--api-workers", "2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f"--listen {address}: Address already in use")


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that follows the short usage."""
    with pytest.raises(SystemExit) as left:
        service.main(flags)
    assert left.value.code == 2
    usage, line = capsys.readouterr().err.splitlines()
    assert usage == "usage: python -m scheduler_svc [OPTION ...]"
    return line.removeprefix("python -m scheduler_svc: error: ")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--listen", "nonsense"], "--listen nonsense: must be HOST:PORT, with a port of at most 65535"),
        (["--listen", "127.0.0.1:99999"], "--listen 127.0.0.1:99999: must be HOST:PORT, with a port of at most 65535"),
        (["--api-workers", "0"], "argument --api-workers: 0: 1 to 64"),
        (
            ["--executors", "127.0.0.1:1"],
            "--executors 127.0.0.1:1: must be tcp://HOST:PORT, with a port of at most 65535",
        ),
        (["--metrics", "9000"], "--metrics 9000: must be HOST:PORT, with a port of at most 65535"),
        (["--drain-limit", "soon"], "--drain-limit soon: must be a number of seconds"),
        (["--run-dir", "/proc/none"], "--run-dir /proc/none: No such file or directory"),
    ],
)
def test_nonsense_is_refused_by_name(capsys: pytest.CaptureFixture[str], flags: list[str], text: str) -> None:
    assert refusal(capsys, "--listen", "127.0.0.1:0", *flags) == text


def test_every_workers_metrics_port_must_be_free(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(capsys, "--listen", "127.0.0.1:0", "--api-workers", "2", "--metrics", f"127.0.0.1:{port - 1}")
    # Unless somebody else has the port before it: that is refused, too.
    assert line in {f"--metrics 127.0.0.1:{p}: Address already in use" for p in (port, port - 1)}
    last = refusal(capsys, "--listen", "127.0.0.1:0", "--api-workers", "2", "--metrics", "127.0.0.1:65535")
    assert last.startswith("--metrics 127.0.0.1:6553")


def test_a_run_dir_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = run("--listen", "127.0.0.1:0", "--run-dir", str(tmp_path))
    assert done.returncode == 2
    assert "mode 0700" in done.stderr


def test_without_a_temporary_folder_the_flag_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.tempfile, "tempdir", "/proc/none")
    assert refusal(capsys, "--listen", "127.0.0.1:0") == "No such file or directory: give --run-dir"


def test_the_default_run_dir_is_private_and_goes_away() -> None:
    with service.run_dir(None) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_given_run_dir_is_made_private_and_stays(tmp_path: Path) -> None:
    with service.run_dir(tmp_path / "a" / "b") as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / service.SOCKET_NAME).touch()
    assert folder.exists()
    assert not (folder / service.SOCKET_NAME).exists()
