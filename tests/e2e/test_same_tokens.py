"""Token ids are equal, without exception, between all of our own configurations: greedy and seeded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("same-tokens")) as cluster:
        cluster.start_executor("only", tiny)
        yield cluster


def test_with_32_others_in_flight(shared: Cluster, alone: list[Answer]) -> None:
    others = [request(random_prompt(20 + i, seed=5000 + i), 60, **(SEEDED | {"seed": i})) for i in range(32)]
    answers = generate(shared.address, [*others, *common_requests()])
    assert ids(answers[32:]) == ids(alone)
    settled(shared)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_settings(cluster: Cluster, alone: list[Answer], name: str) -> None:
    cluster.restart_scheduler(*SCHEDULERS[name])
    cluster.wait_ready()
    first = generate(cluster.address, common_requests())
    assert ids(first) == ids(alone)
    second = generate(cluster.address, common_requests())  # with what the first left in the prefix cache
    assert ids(second) == ids(alone)
    cached = sum(answer.usage.cached_tokens for answer in second if answer.usage)
    assert (cached == 0) == (name == "no-prefix-cache")
    settled(cluster)


def test_forced_preemption(cluster: Cluster, alone: list[Answer]) -> None:
    """A pool that holds about a quarter of the load: rows are preempted and continued, and nothing shows."""
    before = [request(random_prompt(30, seed=300 + i), 100, **GREEDY) for i in range(8)]
    cluster.restart_scheduler("--kv-blocks-limit", "24")
    cluster.wait_ready()
    answers = generate(cluster.address, [*before, *common_requests()])
    assert ids(answers[8:]) == ids(alone)
    assert all(len(answer.ids) == 100 for answer in answers[:8])
    assert settled(cluster)["counters"]["preemptions"] > 0


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_overlap(tiny: Path, cluster: Cluster, alone: list[Answer], overlap: str) -> None:
    cluster.executors["only"].stop()
    cluster.restart_scheduler()
    cluster.start_executor("only", tiny, overlap)
    cluster.wait_ready()
    assert ids(generate(cluster.address, common_requests())) == ids(alone)
    settled(cluster)
