"""Several models, several executors of one model, several API workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.e2e.harness import Cluster
from tests.e2e.process import TIMEOUT, bounded
from tests.e2e.streams import GREEDY, Answer, common_requests, generate, ids, one, random_prompt, request
from tests.e2e.verify import settled


@pytest.fixture(scope="module")
def fleet(tiny: Path, other_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("fleet")) as cluster:
        cluster.start_scheduler(api_workers=2)
        for name, model in (("tiny-1", tiny), ("tiny-2", tiny), ("other-1", other_tiny)):
            cluster.start_executor(name, model)
        for model, executors in (("tiny", 2), ("other", 1)):
            cluster.wait_ready(executors, model)
        yield cluster


def test_two_models_at_once(fleet: Cluster, alone: list[Answer]) -> None:
    messages = common_requests()
    for message in messages:
        message.model = "tiny"
    others = [request(list(message.token_ids.ids), 40, model="other", **GREEDY) for message in messages[::2]]
    answers = generate(fleet.address, [*messages, *others])
    assert ids(answers[: len(messages)]) == ids(alone)
    assert ids(answers[len(messages) :]) != ids(alone[::2]), "the other model's weights answer"
    status = settled(fleet)
    assert len(status["executors"]) == 3


def test_both_executors_of_a_model_work(fleet: Cluster) -> None:
    load = [request(random_prompt(40, seed=i), 60, model="tiny", **GREEDY) for i in range(24)]
    before = {e["name"]: e["steps"] for e in fleet.status()["executors"]}
    generate(fleet.address, load)
    after = {e["name"]: e["steps"] for e in settled(fleet)["executors"]}
    assert all(after[name] > before[name] for name in ("tiny-1", "tiny-2"))


def test_model_must_be_named_where_there_are_two(fleet: Cluster) -> None:
    with pytest.raises(ExceptionGroup) as failure:
        one(fleet.address, request([5, 6], 4, **GREEDY))
    error = failure.value.exceptions[0]
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_both_api_workers_serve(fleet: Cluster) -> None:
    """Connections are spread over the workers by the kernel: with many, each worker gets some."""
    assert len(fleet.pids("api")) == 2
    served = {worker["name"]: worker["sent"] for worker in fleet.status()["workers"]}
    for i in range(64):  # all of them to one: 2 ** -63
        one(fleet.address, request(random_prompt(5, seed=i), 2, model="other", **GREEDY))
        now = {worker["name"]: worker["sent"] for worker in fleet.status()["workers"]}
        if sum(now[name] > count for name, count in served.items()) == 2:
            break
    else:
        pytest.fail(f"one worker got every connection: {served} -> {now}")
    settled(fleet)


def test_an_executor_drains_under_load(fleet: Cluster, alone: list[Answer]) -> None:
    """SIGTERM: what it ran goes on elsewhere or ends there, nothing is lost, and it leaves with status 0."""
    messages = common_requests()
    for message in messages:
        message.model = "tiny"
    leaving = fleet.executors["tiny-2"]
    answers = generate(
        fleet.address, messages, lambda index, answer: leaving.terminate() if len(answer.ids) > 8 else None
    )
    assert ids(answers) == ids(alone)
    assert leaving.wait() == 0
    for _ in bounded(TIMEOUT, "the core keeps an executor that has left"):
        if [e["name"] for e in settled(fleet)["executors"] if e["model"] == "tiny"] == ["tiny-1"]:
            break
