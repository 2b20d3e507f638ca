"""The scheduler service: ``python -m scheduler_svc``, one core and N API workers under one supervisor.

Flags that are not listed here are the core's (``python -m scheduler_svc.core --help``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from protos.link_address import check_link_address
from scheduler_svc import logs
from scheduler_svc.child import Child, Watch
from scheduler_svc.host_port import host_port
from scheduler_svc.supervisor import Patience, Supervisor

log = logging.getLogger("scheduler_svc")

# Passed on to every API worker: name -> its argument's name, or None for a switch. What they mean and default to:
# python -m scheduler_svc.api --help. tests/ops checks that this table is complete.
API_FLAGS: dict[str, str | None] = {
    "--no-reflection": None,
    "--window": "TOKENS",
    "--max-streams": "N",
    "--core-down-limit": "SECONDS",
    "--model-patience": "SECONDS",
    "--slow-client": "SECONDS",
    "--slow-tokens": "TOKENS",
    "--leave-grace": "SECONDS",
    "--drain-limit": "SECONDS",
    "--max-message-bytes": "BYTES",
    "--api-keys": "FILE",
    "--tls-cert": "FILE",
    "--tls-key": "FILE",
    "--tls-client-ca": "FILE",
    "--admin-key-file": "FILE",
}
DEFAULT_LEAVE_GRACE = 2.0
DEFAULT_DRAIN_LIMIT = 60.0
DRAIN_MARGIN = 5.0  # seconds the API workers get beyond their own limits before they are killed
STANDBY_AFTER = 2.0  # seconds after a core's start: its own start, and the streams that go on, come first
SOCKET_NAME = "front.sock"
MAX_SOCKET_PATH = 107  # bytes: what the kernel takes


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(
        prog="python -m scheduler_svc", usage="%(prog)s [OPTION ...]", description=__doc__, allow_abbrev=False
    )
    add = parse.add_argument
    add("--listen", default="127.0.0.1:50051", metavar="HOST:PORT", help="the gRPC API (%(default)s)")
    add("--executors", default="tcp://127.0.0.1:5600", metavar="tcp://HOST:PORT", help="for executors (%(default)s)")
    add("--api-workers", type=_workers, default=1, metavar="N", help="API worker processes on one port (%(default)s)")
    add("--metrics", metavar="HOST:PORT", help="Prometheus metrics of the first API worker; the next ones: PORT+1, ...")
    add("--admin", metavar="HOST:PORT", help="the operators' API, of the first API worker (default: off)")
    add("--run-dir", type=Path, metavar="DIR", help="private folder for the socket between the processes (a new one)")
    logs.add_arguments(parse)
    group = parse.add_argument_group("API workers", "see python -m scheduler_svc.api --help")
    for flag, metavar in API_FLAGS.items():
        if metavar is None:
            group.add_argument(flag, action="store_true")
        else:
            group.add_argument(flag, metavar=metavar)
    return parse


def _workers(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 64:
        raise argparse.ArgumentTypeError(f"{value}: 1 to 64")
    return value


def _value(args: argparse.Namespace, flag: str) -> str | bool | None:
    value: str | bool | None = getattr(args, flag.lstrip("-").replace("-", "_"))
    return value


def core_command(args: argparse.Namespace, front: str, rest: Sequence[str], ledger: int) -> list[str]:
    return [
        *(sys.executable, "-m", "scheduler_svc.core"),
        *("--listen", args.executors, "--front", front, "--ledger-fd", str(ledger)),
        *("--log-level", args.log_level, "--log-format", args.log_format),
        *rest,
    ]


def metrics_address(args: argparse.Namespace, index: int) -> str:
    host, port = args.metrics.rpartition(":")[::2]
    return f"{host}:{int(port) + index}"


def worker_command(args: argparse.Namespace, front: str, index: int) -> list[str]:
    command = [
        *(sys.executable, "-m", "scheduler_svc.api"),
        *("--front", front, "--listen", args.listen, "--worker-name", f"api-{index}"),
        *("--log-level", args.log_level, "--log-format", args.log_format),
    ]
    if args.api_workers > 1:
        command.append("--reuse-port")
    if args.metrics:
        command += ["--metrics", metrics_address(args, index)]
    if args.admin and index == 0:
        command += ["--admin", args.admin]
    for flag, metavar in API_FLAGS.items():
        value = _value(args, flag)
        if value:
            command += [flag] if metavar is None else [flag, str(value)]
    return command


def check_free(flag: str, address: str) -> None:
    """Raises ValueError for an address that cannot be bound. Workers that share a port (SO_REUSEPORT) would join a
    foreign service on it without a word."""
    if address.startswith("unix:"):
        return
    host, port = host_port(flag, address)
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found)
    except OSError as error:
        raise ValueError(f"{flag} {address}: {error.strerror}") from None


@contextlib.contextmanager
def run_dir(given: Path | None) -> Iterator[Path]:
    """A folder that only this user can enter: whoever reaches the socket in it may submit and cancel anything."""
    if given is None:
        try:
            folder = Path(tempfile.mkdtemp(prefix="stepwire-"))  # made with mode 0700
        except OSError as error:
            raise ValueError(f"{error.strerror or error}: give --run-dir") from None
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = given.stat()
    except OSError as error:
        raise ValueError(f"--run-dir {given}: {error.strerror}") from None
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise ValueError(f"--run-dir {given}: must belong to this user alone (mode 0700)")
    try:
        yield given
    finally:
        (given / SOCKET_NAME).unlink(missing_ok=True)


def nameless_file() -> int:
    """For what one core leaves to the next; in memory, so that no full disk keeps it away. Ends with the processes."""
    if sys.platform == "linux":
        return os.memfd_create("core-ledger")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def patience(args: argparse.Namespace) -> Patience:
    grace = _seconds(args, "--leave-grace", DEFAULT_LEAVE_GRACE)
    limit = _seconds(args, "--drain-limit", DEFAULT_DRAIN_LIMIT)
    return Patience(drain=grace + limit + DRAIN_MARGIN)


def _seconds(args: argparse.Namespace, flag: str, default: float) -> float:
    text = _value(args, flag)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f"{flag} {text}: must be a number of seconds") from None


def main(argv: Sequence[str] | None = None) -> int:
    parse = parser()
    args, rest = parse.parse_known_args(argv)
    logs.configure("supervisor", level=args.log_level, format=args.log_format)
    try:
        waits = patience(args)
        check_free("--listen", args.listen)
        check_link_address("--executors", args.executors, listens=True)
        if args.admin:
            check_free("--admin", args.admin)
        if args.metrics:
            host_port("--metrics", args.metrics)
            for index in range(args.api_workers):
                check_free("--metrics", metrics_address(args, index))
        with run_dir(args.run_dir) as folder:
            path = (folder / SOCKET_NAME).resolve()
            if len(os.fsencode(path)) > MAX_SOCKET_PATH:
                raise ValueError(f"--run-dir {folder}: its path is too long for a socket")
            front = f"ipc://{path}"
            ledger = nameless_file()
            command = core_command(args, front, rest, ledger)
            core = Child("core", command, descriptors=(ledger,), standby_after=STANDBY_AFTER)
            workers = [
                Child(f"api-{i}", worker_command(args, front, i), watch=Watch()) for i in range(args.api_workers)
            ]
            return asyncio.run(Supervisor(core, workers, front, waits).run())
    except ValueError as error:
        parse.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
