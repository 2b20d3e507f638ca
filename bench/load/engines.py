"""The engines of a comparison, each able to run one wave of requests: all sent at once, measured to the last token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc

from bench.load.figures import figures
from bench.load.grpc_driver import GrpcDriver, find_model
from bench.load.http_driver import HttpDriver
from bench.load.processes import ServerProcess, free_port, http_ready
from bench.load.record import Record, Request
from bench.load.shards import Shard, run_load

TIMEOUT = 900.0  # seconds, of one request
START_TIMEOUT = 900.0  # seconds: some peers compile at their first start


class Engine(Protocol):
    """``pids``: the roots of its process trees. ``pause``: it must use no processor time until ``resume``."""

    name: str
    pids: list[int]

    def wave(self, requests: list[Request]) -> dict[str, Any]: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def stop(self) -> None: ...


class Stepwire:
    """Both services, as a user starts them: ``python -m scheduler_svc`` and ``python -m executor_svc``."""

    def __init__(self, model: Path, log_dir: Path, extra: list[str], name: str = "stepwire") -> None:
        self.name = name
        self._address, link = f"127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
        scheduler = [sys.executable, "-m", "scheduler_svc", "--listen", self._address, "--executors", link]
        executor = [sys.executable, "-m", "executor_svc", "--model", str(model), "--scheduler", link, *extra]
        self._servers = [ServerProcess("scheduler", scheduler, log_dir / f"{name}-scheduler.log")]
        try:
            self._servers.append(ServerProcess("executor", executor, log_dir / f"{name}-executor.log"))
            self.pids = [server.pid for server in self._servers]
            self._servers[1].wait_ready(self._ready, START_TIMEOUT)
        except BaseException:
            self.stop()
            raise
        self._model = find_model(self._address, "", timeout=10.0).name

    def _ready(self) -> bool:
        with contextlib.suppress(LookupError, grpc.RpcError):
            return find_model(self._address, "", timeout=2.0).executors_ready > 0
        return False

    def wave(self, requests: list[Request]) -> dict[str, Any]:
        return run_load(Shard(partial(GrpcDriver, self._address, self._model, TIMEOUT), requests, len(requests)))[1]

    def pause(self) -> None:
        """Idle services only exchange heartbeats, and a stopped one would be taken for dead."""

    def resume(self) -> None:
        return None

    def stop(self) -> None:
        for server in reversed(self._servers):
            server.stop()


class Vllm:
    """vLLM's OpenAI server on its CPU backend, float32, with the settings that served it best here."""

    name = "vllm"

    def __init__(self, python: Path, model: Path, log_dir: Path) -> None:
        self._port = free_port()
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "m", "--dtype", "float32", "--max-model-len", "2048", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--max-num-seqs", "64", "--max-num-batched-tokens", "2048"]
        command += ["--disable-uvicorn-access-log"]
        cores = os.cpu_count() or 1
        env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        env["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{cores - 1}"
        self._server = ServerProcess("vllm", command, log_dir / "vllm.log", env)
        self.pids = [self._server.pid]
        try:
            url = f"http://127.0.0.1:{self._port}/health"
            self._server.wait_ready(lambda: http_ready(url), START_TIMEOUT)
        except BaseException:
            self.stop()
            raise

    def wave(self, requests: list[Request]) -> dict[str, Any]:
        return run_load(Shard(partial(HttpDriver, "127.0.0.1", self._port, "m", TIMEOUT), requests, len(requests)))[1]

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def stop(self) -> None:
        self._server.stop()


class OpenVino:
    """OpenVINO GenAI in a process of its own, without any server: no transport cost is counted against it."""

    def __init__(self, python: Path, model: Path, log_dir: Path, name: str = "openvino") -> None:
        self.name = name
        worker = Path(__file__).with_name("openvino_worker.py")
        self._log = (log_dir / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            [str(python), str(worker), str(model), "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.pids = [self._process.pid]
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"openvino worker ended with {self._process.wait()}; see {self._log.name}")

    def wave(self, requests: list[Request]) -> dict[str, Any]:
        assert self._process.stdin is not None
        order = {"prompts": [r.prompt for r in requests], "output_tokens": requests[0].output_tokens}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        records = []
        for request, (first, last, tokens, messages) in zip(requests, self._answer()["requests"], strict=True):
            gaps = [(last - first) / (messages - 1)] * (messages - 1) if messages > 1 else []
            times = {"first": first, "last": last, "end": last, "gaps": gaps}
            size = {"prompt_tokens": len(request.prompt), "output_tokens": tokens, "messages": messages}
            records.append(Record(request.index, **times, **size))
        return figures(records)

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.resume()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._log.close()


def settle(seconds: float = 1.0) -> None:
    """Lets threads that spin after work go to sleep before the next engine is measured."""
    time.sleep(seconds)
