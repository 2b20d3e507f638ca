"""Either side may start first; without executors requests wait, bounded, and health says so."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest

from tests.e2e.harness import Cluster, HealthWatch
from tests.e2e.process import START_TIMEOUT
from tests.e2e.streams import GREEDY, Answer, common_requests, ids, one, request
from tests.e2e.verify import settled

WAIT = 1.5  # seconds a request may wait for an executor here


def test_scheduler_first_then_executor_gone(tiny: Path, tmp_path: Path, alone: list[Answer]) -> None:
    """NOT_SERVING, SERVING, NOT_SERVING; the executors-first order is that of the ``shared`` cluster."""
    with Cluster(tmp_path) as cluster:
        cluster.start_scheduler("--wait-for-executor", str(WAIT))
        with HealthWatch(cluster.address) as health:
            health.wait_for("NOT_SERVING")
            cluster.start_executor("late", tiny)
            health.wait_for("SERVING", START_TIMEOUT)
            assert [one(cluster.address, common_requests()[0]).ids] == ids(alone[:1])
            settled(cluster)
            cluster.kill("late")
            health.wait_for("NOT_SERVING")
            began = time.monotonic()
            with pytest.raises(ExceptionGroup) as failure:
                one(cluster.address, request([5, 6, 7], 4, model="tiny", **GREEDY))
            waited = time.monotonic() - began
            error = failure.value.exceptions[0]
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            assert WAIT * 0.5 < waited < WAIT + 15, "it waits for the executor that may come back, bounded"
            assert health.seen == ["NOT_SERVING", "SERVING", "NOT_SERVING"]
        settled(cluster)
