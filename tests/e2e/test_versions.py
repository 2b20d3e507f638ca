"""Protocol versions N and N + 1 side by side; a rolling restart of every process from one to the other, under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.faults.streams import run_all
from bench.faults.verdict import judge
from protos.stepwire.v1 import inference_pb2 as pb
from stepwire import AsyncClient
from tests.e2e.harness import Cluster
from tests.e2e.next_version import NEXT, TODAY
from tests.e2e.process import START_TIMEOUT
from tests.e2e.streams import GREEDY, SEEDED, Answer, generate, ids, random_prompt, request
from tests.e2e.verify import settled

LATER = "tests.e2e.next_version"
STREAMS = 12


def joined(cluster: Cluster, name: str) -> list[int]:
    """The versions agreed with this executor, in order, as the present scheduler says."""
    assert cluster.scheduler is not None
    said = re.findall(rf'event="executor joined" executor={name} .*protocol=(\d+)', cluster.scheduler.text())
    return [int(version) for version in said]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rolling_restart_from_version_to_version(tiny: Path, tmp_path: Path) -> None:
    """Executors first, then the scheduler with all its processes, then back: clients see nothing of it."""
    with Cluster(tmp_path) as cluster:
        for name in ("a", "b"):
            cluster.start_executor(name, tiny)
        cluster.start_scheduler("--drain-limit", "5", api_workers=2)
        cluster.wait_ready(2)
        messages = [
            request(random_prompt(20 + i, seed=i), 200, request_id=f"r{i}", **options)
            for i, options in enumerate([GREEDY, SEEDED | {"seed": 5}] * (STREAMS // 2))
        ]
        expected = asyncio.run(streamed(cluster, messages, lambda: None))
        restarts = Restarts(cluster, tiny)
        outcomes = asyncio.run(streamed(cluster, messages, restarts.run))
        assert [judge(want, got) for want, got in zip(expected, outcomes, strict=True)] == [("", "")] * STREAMS
        assert restarts.versions == [TODAY[0], TODAY[0], NEXT, NEXT, TODAY[0], TODAY[0]]
        cluster.wait_ready(2)
        settled(cluster)


async def streamed(cluster: Cluster, messages: list[pb.GenerateRequest], act: Callable[[], None]) -> list:
    """The streams, begun again and again with other ids until ``act`` is done; the last answer to each."""
    clients = [AsyncClient(cluster.address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
    try:
        acting = asyncio.create_task(asyncio.to_thread(act))
        rounds = 0
        while True:
            rounds += 1
            for message in messages:
                message.request_id = f"{message.request_id.split('.')[0]}.{rounds}"
            outcomes = await run_all(clients, messages, STREAMS, 1)
            assert [outcome.error for outcome in outcomes] == [""] * len(messages)
            if acting.done():
                acting.result()
                return outcomes
    finally:
        for client in clients:
            await client.close()


class Restarts:
    """One process after the other, by SIGTERM, and its successor."""

    def __init__(self, cluster: Cluster, model: Path) -> None:
        self._cluster = cluster
        self._model = model
        self.versions: list[int] = []  # agreed after each change

    def run(self) -> None:
        cluster = self._cluster
        for name in ("a", "b"):
            self._executor(name, f"{LATER} executor_svc")  # N + 1 at a core of N
            self.versions += joined(cluster, name)[-1:]
        for module in ("api", "api", "core"):
            (pid, *_) = cluster.pids(module)
            os.kill(pid, signal.SIGTERM)
            cluster.wait_replaced(module, pid)
            cluster.wait_ready(2)
        self._scheduler(f"{LATER} scheduler_svc")
        self.versions += [joined(cluster, name)[-1] for name in ("a", "b")]  # both of N + 1
        for name in ("a", "b"):
            self._executor(name, "executor_svc")  # N at a core of N + 1
            self.versions += joined(cluster, name)[-1:]
        self._scheduler("scheduler_svc")

    def _executor(self, name: str, module: str) -> None:
        old = self._cluster.executors[name]
        old.terminate()
        assert old.wait(START_TIMEOUT) == 0
        self._cluster.start_executor(name, self._model, module=module).wait_log("event=welcomed", START_TIMEOUT)
        self._cluster.wait_ready(2)

    def _scheduler(self, module: str) -> None:
        assert self._cluster.scheduler is not None
        self._cluster.scheduler.terminate()
        assert self._cluster.scheduler.wait(START_TIMEOUT) == 0
        self._cluster.start_scheduler("--drain-limit", "5", api_workers=2, module=module)
        self._cluster.wait_ready(2)


def test_an_executor_that_is_too_new_is_refused_by_name(shared: Cluster, tiny: Path, alone: list[Answer]) -> None:
    """The others are not touched; it tries again later, and leaves when told."""
    assert shared.scheduler is not None
    process = shared.start_executor("too-new", tiny, module=f"{LATER} only executor_svc")
    try:
        said = shared.scheduler.wait_log(r'event="executor refused" executor=too-new reason=(.*)', START_TIMEOUT)
        assert f"protocol versions [{NEXT}]" in said[1]
        process.wait_log("refused")
        assert process.alive
    finally:
        process.terminate()
        assert process.wait() == 0
        del shared.executors["too-new"]
    assert ids(generate(shared.address, [request([5, 6, 7], 8, **GREEDY)])) is not None
    settled(shared)
