"""A request that kills, hangs or spoils every executor it runs on: it alone ends, with a clear error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.e2e.harness import Cluster
from tests.e2e.planted_executor import EXIT, HANG, NAN
from tests.e2e.process import POLL
from tests.e2e.streams import GREEDY, Answer, common_requests, generate, ids, one, request
from tests.e2e.verify import settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
MODULE = "tests.e2e.planted_executor"


def keep_running(cluster: Cluster, model: Path, stop: threading.Event) -> None:
    """What an operator's init system does. A hung executor is killed once the core has given it up."""
    while not stop.wait(POLL):
        for name, process in list(cluster.executors.items()):
            if process.alive and "executor hangs" in scheduler_log(cluster):
                hung = scheduler_log(cluster).count(f'event="executor hangs" executor={name}')
                if hung > hangs.get(name, 0):
                    hangs[name] = hung
                    process.popen.kill()
                    process.wait()
            if not process.alive:
                cluster.start_executor(name, model, module=MODULE)


hangs: dict[str, int] = {}


def scheduler_log(cluster: Cluster) -> str:
    assert cluster.scheduler is not None
    return cluster.scheduler.text()


@pytest.fixture
def planted(tiny: Path, tmp_path: Path) -> Iterator[Cluster]:
    hangs.clear()
    stop = threading.Event()
    with Cluster(tmp_path) as cluster, ThreadPoolExecutor(1) as pool:
        cluster.start_scheduler("--cold-step-timeout", "5")
        for name in ("a", "b"):
            cluster.start_executor(name, tiny, module=MODULE)
        cluster.wait_ready(2)
        pool.submit(keep_running, cluster, tiny, stop)
        try:
            yield cluster
        finally:
            stop.set()


@pytest.mark.parametrize("token", [EXIT, HANG])
def test_a_request_that_kills_its_executors(planted: Cluster, alone: list[Answer], token: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(generate, planted.address, common_requests(), timeout=300)
        with pytest.raises(ExceptionGroup) as failure:
            one(planted.address, request([token, 5, 6], 8, **GREEDY), timeout=300)
        error = failure.value.exceptions[0]
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "died twice while it ran this request alone" in (error.details() or "")
        assert ids(good.result()) == ids(alone)
    planted.wait_ready(2)
    settled(planted)


def test_a_row_of_nan_is_that_requests_alone(tiny: Path, tmp_path: Path, alone: list[Answer]) -> None:
    with Cluster(tmp_path) as cluster, ThreadPoolExecutor(1) as pool:
        cluster.start_scheduler()
        cluster.start_executor("a", tiny, module=MODULE)
        cluster.wait_ready()
        good = pool.submit(generate, cluster.address, common_requests())
        with pytest.raises(ExceptionGroup) as failure:
            one(cluster.address, request([NAN, 5, 6], 8, **GREEDY))
        error = failure.value.exceptions[0]
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "non-finite" in (error.details() or "")
        assert ids(good.result()) == ids(alone)
        assert settled(cluster)["counters"].get("epochs_lost", 0) == 0
