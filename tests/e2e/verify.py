"""What must hold after every test: nothing runs, nothing is held, every block is where it must be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.e2e.harness import Cluster
from tests.e2e.process import TIMEOUT, bounded


def settled(cluster: Cluster) -> dict[str, Any]:
    """Waits until nothing runs or waits; then no block or slot is owned and no invariant is broken. Returns the status.

    Every stream's end was seen by the client (``Answer.check_end``: exactly one); here the core has none left.
    """
    for _ in bounded(TIMEOUT, lambda: f"still busy: {cluster.status(check_invariants=True)}"):
        status = cluster.status(check_invariants=True)
        assert status["problems"] == []
        if quiet(status):
            break
    for executor in status["executors"]:
        blocks = executor["blocks"]
        assert blocks["owned"] == 0, executor
        assert blocks["free"] + blocks["cached"] == blocks["total"], executor
        assert executor["settling"] == 0, executor
    return status


def quiet(status: dict[str, Any]) -> bool:
    models = all(m["running"] == m["waiting"] == m["live_streams"] == 0 for m in status["models"])
    executors = all(e["slots"]["used"] == e["unanswered"] == 0 for e in status["executors"])
    return models and executors and all(w["streams"] == 0 for w in status["workers"])


@contextlib.contextmanager
def ends_within_a_step(cluster: Cluster, request_id: str, others: int) -> Iterator[None]:
    """The request ends inside; ``others`` is the number of other sequences that may be running meanwhile.

    From the moment the core has heard of the end, no slot and no block is the request's, and no step is planned with
    it: only the rows of plans that were already unanswered come back for nobody.
    """
    before = cluster.status(request_id=request_id)
    (choice,) = before["request"]["choices"]
    assert choice["state"] == "RUNNING", choice
    yield
    for _ in bounded(TIMEOUT, lambda: f"not released: {cluster.status(request_id=request_id)}"):
        status = cluster.status(request_id=request_id, check_invariants=True)
        assert status["problems"] == []
        if status["request"].get("state") == "unknown":
            break
    assert sum(executor["slots"]["used"] for executor in status["executors"]) <= others
    for _ in bounded(TIMEOUT, "plans stay unanswered"):
        later = cluster.status()
        if all(now["steps"] >= then["steps"] + then["unanswered"] for now, then in pairs(later, status)):
            break
    wasted = later["counters"]["dropped_rows"] - before["counters"]["dropped_rows"]
    assert wasted <= before["config"]["depth"], f"{wasted} rows ran for nobody"


def pairs(later: dict[str, Any], earlier: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(later["executors"], earlier["executors"], strict=True))
