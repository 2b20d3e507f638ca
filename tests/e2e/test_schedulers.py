"""Two schedulers, executors that know both, and a client that goes on at the other one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults.streams import Outcome, run_all
from protos.stepwire.v1 import inference_pb2 as pb
from stepwire import AsyncClient
from tests.e2e.harness import Cluster
from tests.e2e.process import START_TIMEOUT, bounded
from tests.e2e.streams import GREEDY, SEEDED, Answer, generate, random_prompt, request
from tests.e2e.verify import settled

OUTPUT = 400
PATIENT = "tests.e2e.patient_executor"


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    folder = tmp_path_factory.mktemp("pair")
    with Cluster(folder / "one") as one, Cluster(folder / "two") as two:
        links = [one.link, two.link]
        for cluster in (one, two):
            cluster.start_scheduler()
        # One after the other: each goes where it is needed more.
        for cluster, name in ((one, "a"), (two, "b")):
            process = cluster.start_executor(name, tiny, "--rehome-after", "3", links=links, module=PATIENT)
            process.wait_log("event=welcomed", START_TIMEOUT)
        for cluster in (one, two):
            cluster.wait_ready()
        yield one, two


def test_each_scheduler_gets_one(pair: tuple[Cluster, Cluster]) -> None:
    names = [[executor["name"] for executor in cluster.status()["executors"]] for cluster in pair]
    assert sorted(map(len, names)) == [1, 1], names


def test_streams_go_on_at_the_other_scheduler(pair: tuple[Cluster, Cluster], shared: Cluster) -> None:
    """A whole scheduler is killed and stays away: its streams continue elsewhere, its executor follows later."""
    one, two = pair
    messages = [request(random_prompt(20 + i, seed=i), OUTPUT, **GREEDY, request_id=f"g{i}") for i in range(4)]
    messages += [request(random_prompt(20 + i, seed=i), OUTPUT, **SEEDED, seed=i, request_id=f"s{i}") for i in range(4)]
    expected: list[Answer] = generate(shared.address, messages)
    outcomes = asyncio.run(disturbed(one, two, messages))
    assert [outcome.error for outcome in outcomes] == [""] * len(messages)
    assert [outcome.ids[0] for outcome in outcomes] == [answer.ids for answer in expected]
    assert [outcome.texts[0] for outcome in outcomes] == [answer.text for answer in expected]
    assert sum(outcome.continuations for outcome in outcomes) >= 1
    for _ in bounded(START_TIMEOUT, "the executor did not look for another scheduler"):
        if len(two.status()["executors"]) == 2:
            break
    settled(two)


async def disturbed(one: Cluster, two: Cluster, messages: list[pb.GenerateRequest]) -> list[Outcome]:
    seen = 0

    def on_tokens(count: int) -> None:
        nonlocal seen
        before, seen = seen, seen + count
        if before < 20 <= seen:
            one.kill("scheduler")

    async with AsyncClient([one.address, two.address]) as client:
        return await run_all([client], messages, len(messages), 2, on_tokens)
