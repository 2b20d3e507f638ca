"""Token ids are equal, without exception, between all of our own configurations: greedy and seeded.

Overlap is in test_failover.py (its second executor runs with it), continuation in test_continue.py.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import Cluster
from tests.e2e.streams import GREEDY, SEEDED, Answer, common_requests, generate, ids, random_prompt, request
from tests.e2e.verify import settled

# name -> flags of the scheduler; the executor stays and reconnects
SCHEDULERS = {
    "chunk-1": ["--max-prefill-chunk", "1"],
    "chunk-7": ["--max-prefill-chunk", "7"],
    "chunk-64": ["--max-prefill-chunk", "64"],
    "no-prefix-cache": ["--no-prefix-cache"],
    "depth-1": ["--depth", "1"],
    "depth-3": ["--depth", "3"],
}


def test_with_32_others_in_flight(shared: Cluster, alone: list[Answer]) -> None:
    others = [request(random_prompt(20 + i, seed=5000 + i), 60, **(SEEDED | {"seed": i})) for i in range(32)]
    answers = generate(shared.address, [*others, *common_requests()])
    assert ids(answers[32:]) == ids(alone)
    settled(shared)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_settings(restartable: Cluster, alone: list[Answer], name: str) -> None:
    restartable.restart_scheduler(*SCHEDULERS[name])
    restartable.wait_ready()
    first = generate(restartable.address, common_requests())
    assert ids(first) == ids(alone)
    second = generate(restartable.address, common_requests())  # with what the first left in the prefix cache
    assert ids(second) == ids(alone)
    cached = sum(answer.usage.cached_tokens for answer in second if answer.usage)
    assert (cached == 0) == (name == "no-prefix-cache")
    assert settled(restartable)["counters"]["finished"] == len(first) + len(second), "exactly one end each"


def test_forced_preemption(restartable: Cluster, alone: list[Answer]) -> None:
    """A pool that holds about a quarter of the load: rows are preempted and continued, and nothing shows."""
    before = [request(random_prompt(30, seed=300 + i), 100, **GREEDY) for i in range(8)]
    restartable.restart_scheduler("--kv-blocks-limit", "24")
    restartable.wait_ready()
    answers = generate(restartable.address, [*before, *common_requests()])
    assert ids(answers[8:]) == ids(alone)
    assert all(len(answer.ids) == 100 for answer in answers[:8])
    counters = settled(restartable)["counters"]
    assert counters["preemptions"] > 0
    assert counters["finished"] == len(answers), "exactly one end each"
