"""Real processes on free loopback ports: the supervisor with its core and API workers, and any number of executors.

>>> with Cluster(tmp_path) as cluster:
...     cluster.start_scheduler(core=["--depth", "3"])
...     cluster.start_executor("a", model)
...     cluster.wait_ready()
...     with cluster.client() as client: ...

Whatever happens, ``close`` ends every process by its pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from stepwire import Client
from tests.e2e.process import POLL, START_TIMEOUT, TIMEOUT, Process, bounded, children, gone, name_of
from tests.e2e.status import StatusClient
from tests.ports import free_port

# One thread: the tests share the machine. Compiled kernels are kept between processes.
EXECUTOR_FLAGS = ["--threads", "1"]
EXECUTOR_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

live: list[Cluster] = []  # open clusters, whose logs a failure report shows


class Cluster:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.link = f"tcp://127.0.0.1:{free_port()}"
        self.run_dir = folder / "run"
        self.scheduler: Process | None = None
        self.executors: dict[str, Process] = {}
        self._status: StatusClient | None = None
        live.append(self)

    # ---- processes

    def start_scheduler(self, *flags: str, api_workers: int = 1, module: str = "scheduler_svc") -> Process:
        """Starts ``python -m scheduler_svc`` with ``flags``; returns when it serves gRPC (not: when it has a model).
        ``module``: one that behaves like it."""
        assert self.scheduler is None or not self.scheduler.alive
        args = ["-m", *module.split(), "--listen", self.address, "--executors", self.link]
        args += ["--run-dir", str(self.run_dir), "--api-workers", str(api_workers), "--leave-grace", "0", *flags]
        self.scheduler = Process("scheduler", args, self.folder / "scheduler.log")
        self._wait_door(self.scheduler)
        return self.scheduler

    def restart_scheduler(self, *flags: str, api_workers: int = 1) -> None:
        """Another scheduler service on the same ports; executors stay and reconnect."""
        if self.scheduler is not None:
            self.scheduler.stop()
        self.start_scheduler(*flags, api_workers=api_workers)

    def start_executor(
        self, name: str, model: Path, *flags: str, links: Sequence[str] = (), module: str = "executor_svc"
    ) -> Process:
        """Starts an executor; does not wait for it. A name used before: the former process must have ended. ``links``:
        the schedulers' addresses, where not this cluster's. ``module``: one that behaves like an executor."""
        assert name not in self.executors or not self.executors[name].alive
        args = ["-m", *module.split(), "--model", str(model), "--executor-name", name]
        args += [part for link in links or [self.link] for part in ("--scheduler", link)]
        args += [*EXECUTOR_FLAGS, *flags]
        self.executors[name] = Process(name, args, self.folder / f"executor-{name}.log", EXECUTOR_ENV)
        return self.executors[name]

    def _wait_door(self, process: Process) -> None:
        host, port = self.address.split(":")
        for _ in bounded(TIMEOUT, lambda: f"no gRPC server:\n{process.text()[-4000:]}"):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            assert process.alive, f"scheduler ended with {process.popen.returncode}:\n{process.text()[-4000:]}"

    def pids(self, module: str) -> list[int]:
        """The supervisor's children that run ``scheduler_svc.core`` or ``scheduler_svc.api``, without those that only
        stand by."""
        assert self.scheduler is not None
        found = [(pid, line) for pid, line in children(self.scheduler.pid).items() if f"scheduler_svc.{module}" in line]
        return sorted(pid for pid, line in found if "--standby-fd" not in line or name_of(pid) == module)

    def kill(self, name: str, sig: int = signal.SIGKILL) -> int:
        """``core``, ``api`` (the first worker), ``scheduler``, or an executor's name. Returns the pid."""
        if name in self.executors:
            pid = self.executors[name].pid
        elif name == "scheduler":
            assert self.scheduler is not None
            pid = self.scheduler.pid
        else:
            pid = self.pids(name)[0]
        os.kill(pid, sig)
        return pid

    def wait_replaced(self, module: str, pid: int) -> int:
        """Waits until the supervisor runs another process in the place of ``pid``."""
        for _ in bounded(TIMEOUT, f"{module} was not started again"):
            if gone(pid) and (found := [p for p in self.pids(module) if p != pid]):
                return found[0]
        raise AssertionError

    # ---- the public door

    def client(self, **options: Any) -> Client:
        return Client(self.address, **options)

    def models(self) -> dict[str, pb.Model]:
        with self.channel() as channel:
            return self._models(channel)

    def channel(self) -> grpc.Channel:
        """A connection of its own: with several API workers, perhaps to another one each time."""
        return grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])

    @staticmethod
    def _models(channel: grpc.Channel) -> dict[str, pb.Model]:
        response = pb_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=TIMEOUT)
        return {model.name: model for model in response.models}

    def wait_ready(self, executors: int = 1, model: str = "") -> None:
        """Waits until ``executors`` of the model (of each model, where no name is given) are ready."""
        with HealthWatch(self.address) as health:
            health.wait_for("SERVING", START_TIMEOUT, self._check_alive)
        with self.channel() as channel:
            for _ in bounded(START_TIMEOUT, lambda: f"not ready: {self.logs()}", poll=0.1):
                ready = [m.executors_ready for name, m in self._models(channel).items() if model in ("", name)]
                if ready and min(ready) >= executors:
                    return
                self._check_alive()

    def _check_alive(self) -> None:
        """No process ended but those that a test killed or stopped."""
        for process in self.executors.values():
            assert process.alive or process.popen.returncode in (0, -signal.SIGKILL), process.text()[-4000:]

    # ---- the core's own view

    def status(self, **query: Any) -> dict[str, Any]:
        if self._status is None:
            self._status = StatusClient(self.front_endpoint)
        return self._status.get(**query)

    def forget_status(self) -> None:
        """Before the run folder becomes another one."""
        if self._status is not None:
            self._status.close()
            self._status = None

    @property
    def front_endpoint(self) -> str:
        return f"ipc://{self.run_dir / 'front.sock'}"

    # ---- the end

    def logs(self, size: int = 6000) -> str:
        parts = [f"==== {path.name}\n{path.read_text(errors='replace')[-size:]}" for path in self.folder.glob("*.log")]
        return "\n".join(parts)

    def close(self) -> None:
        if self in live:
            live.remove(self)
        if self._status is not None:
            self._status.close()
        processes = [*self.executors.values(), *([self.scheduler] if self.scheduler else [])]
        for process in processes:
            process.terminate()
        for process in processes:
            process.stop()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            print(self.logs())  # a fixture that failed: its cluster is closed before the report is made
        self.close()


class HealthWatch:
    """The transitions that ``grpc.health.v1.Health/Watch`` reports, in order."""

    def __init__(self, address: str, service: str = "") -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._request = health_pb2.HealthCheckRequest(service=service)
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(self._request)
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self.seen: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            with contextlib.suppress(grpc.RpcError):
                for response in self._call:
                    with self._changed:
                        self.seen.append(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
                        self._changed.notify_all()
            if self._closed.wait(POLL):
                return
            # Its worker left, or none was there just then: a new call is a new look.
            try:
                self._call = health_pb2_grpc.HealthStub(self._channel).Watch(self._request)
            except ValueError:  # closed at this moment
                return

    def wait_for(self, status: str, timeout: float = TIMEOUT, check: Callable[[], None] = lambda: None) -> None:
        """Waits until the newest status is this one; ``check`` is called now and then, and may fail."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self.seen or self.seen[-1] != status:
                left = deadline - time.monotonic()
                assert left > 0, f"health stays {self.seen}, not {status}"
                check()
                self._changed.wait(min(left, 0.5))

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()
        self._channel.close()
        self._thread.join(5)

    def __enter__(self) -> HealthWatch:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
