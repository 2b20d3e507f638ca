"""Both services on this machine, for one command or until Ctrl-C.

::

    python -m deploy.run_local -- python -m stepwire generate --chat "Hi" --address {address}
    python -m deploy.run_local --serve

Starts the scheduler and one executor (logs in .run/), waits until health says SERVING, runs the command ({address} is
replaced), and stops both by their process ids. Exit status: the command's. The standard ports are used where they are
free, for a command any other ones where they are not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scheduler_svc.child import die_with_parent
from stepwire.health import check

API_PORT = 50051
EXECUTOR_PORT = 5600
QUIET = 10.0  # seconds of waiting without a word


class ServiceEnded(Exception):
    """A service ended by itself; the message says which, and how."""


def pick_port(wanted: int, fixed: bool) -> int:
    """`wanted` if it is free; else, unless it is fixed, one that is."""
    for port in (wanted,) if fixed else (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SystemExit(f"port {wanted} on 127.0.0.1 is taken: stop what listens there, or choose another one")


class Service:
    """One service process, in a process group of its own, with its log in a file."""

    def __init__(self, name: str, command: Sequence[str], logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        with open(self.log, "wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=die_with_parent(os.getpid()),
            )

    def check_alive(self) -> None:
        status = self.process.poll()
        if status is not None:
            how = f"status {status}" if status >= 0 else signal.Signals(-status).name
            tail = self.log.read_text(errors="replace").splitlines()[-15:]
            raise ServiceEnded("\n".join([f"the {self.name} ended with {how}; its last words:", *tail]))

    def stop(self, patience: float) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                print(f"the {self.name} did not stop within {patience:.0f} s, killing it", file=sys.stderr)
                self.process.kill()
                self.process.wait()


def wait_until_serving(address: str, services: Sequence[Service], timeout: float) -> None:
    started = time.monotonic()
    logs = ", ".join(str(service.log) for service in services)
    told = False
    while check(address, timeout=2.0) != "SERVING":
        for service in services:
            service.check_alive()
        waited = time.monotonic() - started
        if waited > timeout:
            raise ServiceEnded(f"not serving after {timeout:.0f} s; see {logs}")
        if waited > QUIET and not told:
            told = True
            print(f"still starting (the first start compiles for this CPU); logs: {logs}", file=sys.stderr, flush=True)
        time.sleep(0.1)


@contextlib.contextmanager
def both_services(args: argparse.Namespace, logs: Path) -> Iterator[tuple[str, list[Service]]]:
    fixed = args.serve
    address = f"127.0.0.1:{pick_port(args.port, fixed)}"
    executors = f"tcp://127.0.0.1:{pick_port(args.executor_port, fixed)}"
    logs.mkdir(exist_ok=True)
    services: list[Service] = []
    python = [sys.executable, "-m"]
    try:
        scheduler = [*python, "scheduler_svc", "--listen", address, "--executors", executors]
        # Nobody else is told of this address: nothing can still arrive.
        scheduler += [*([] if fixed else ["--leave-grace", "0"]), *args.scheduler_flag]
        services.append(Service("scheduler", scheduler, logs))
        executor = [*python, "executor_svc", "--model", args.model, "--scheduler", executors, *args.executor_flag]
        services.append(Service("executor", executor, logs))
        wait_until_serving(address, services, args.timeout)
        yield address, services
    finally:
        # The scheduler first: it lets open streams end, for which it needs the executor.
        for service in services:
            service.stop(patience=15.0)


def serve(address: str, services: Sequence[Service], stop: threading.Event) -> int:
    command = f"{os.path.relpath(sys.executable)} -m stepwire generate --chat 'Hi' --address {address}"
    print(f"serving on {address}; try: {command}; Ctrl-C ends it", flush=True)
    while not stop.wait(0.5):
        for service in services:
            service.check_alive()
    return 0


def run_command(command: Sequence[str], services: Sequence[Service]) -> int:
    """Its exit status, as a shell would give it. A service that ends meanwhile ends the command, too."""
    with subprocess.Popen(command, preexec_fn=die_with_parent(os.getpid())) as process:
        try:
            while True:
                try:
                    status = process.wait(0.2)
                    return status if status >= 0 else 128 - status
                except subprocess.TimeoutExpired:
                    for service in services:
                        service.check_alive()
        finally:
            if process.poll() is None:
                process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.run_local", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf", help="a GGUF file or a folder")
    parser.add_argument("--port", type=int, default=API_PORT, help=f"of the gRPC API ({API_PORT})")
    parser.add_argument("--executor-port", type=int, default=EXECUTOR_PORT, help=f"for executors ({EXECUTOR_PORT})")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until both must serve (600)")
    parser.add_argument("--scheduler-flag", action="append", default=[], metavar="FLAG", help="passed on, in order")
    parser.add_argument("--executor-flag", action="append", default=[], metavar="FLAG", help="passed on, in order")
    parser.add_argument("--serve", action="store_true", help="stay up until Ctrl-C")
    parser.add_argument("command", nargs="*", help="after --; {address} is replaced")
    args = parser.parse_args()
    if bool(args.command) == args.serve:
        parser.error("give --serve, or a command after --")
    stop = threading.Event()
    for number in (signal.SIGTERM, *([signal.SIGINT] if args.serve else [])):
        signal.signal(number, lambda *_: stop.set() if args.serve else sys.exit(143))
    try:
        with both_services(args, Path(".run")) as (address, services):
            if args.serve:
                return serve(address, services, stop)
            command = [part.replace("{address}", address) for part in args.command]
            return run_command(command, services)
    except ServiceEnded as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
