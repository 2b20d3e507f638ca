"""A plan that is lost, repeated, reordered or altered on its way is found on that step and costs exactly one epoch."""

from __future__ import annotations

import pytest

from tests.e2e.harness import Cluster
from tests.e2e.streams import Answer, common_requests, generate, ids
from tests.e2e.verify import settled

PLAN = 15  # in the midst of the streams

# kind -> the plan (seq) at which the executor finds it: the first one that arrives and should not
FOUND_AT = {"lose": PLAN + 1, "repeat": PLAN, "reorder": PLAN + 1, "alter": PLAN}


@pytest.mark.parametrize("kind", FOUND_AT)
def test_found_on_that_step(restartable: Cluster, alone: list[Answer], kind: str) -> None:
    restartable.restart_scheduler("--inject", f"{kind}@{PLAN}")
    restartable.wait_ready()
    executor = restartable.executors["only"]
    said = len(executor.text())
    assert ids(generate(restartable.address, common_requests())) == ids(alone)
    lost = [line for line in executor.text()[said:].splitlines() if 'event="epoch lost"' in line]
    assert len(lost) == 1, lost
    assert f"seq={FOUND_AT[kind]} " in lost[0]
    status = settled(restartable)
    assert status["counters"]["epochs_lost"] == 1
    assert (status["counters"]["finished"], status["counters"]["failed"]) == (len(alone), 0), "exactly one end each"
    (session,) = status["executors"]
    assert session["epoch"][1] == 2, "the second epoch of this session"
