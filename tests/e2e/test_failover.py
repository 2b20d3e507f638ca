"""Processes die under load and no stream notices: the same tokens, no error, exactly one end.

The tests of this file build on each other: each leaves the cluster with one executor.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from protos.stepwire.v1 import inference_pb2 as pb
from stepwire import Completion
from tests.e2e.harness import Cluster
from tests.e2e.streams import GREEDY, SEEDED, Answer, common_requests, generate, ids, random_prompt, request
from tests.e2e.verify import settled

OUTPUT = 400  # a second or so: a client that is late is in time to disturb them
KILL_AFTER = 12  # tokens of the first stream


def load() -> list[pb.GenerateRequest]:
    messages = [request(random_prompt(20 + 5 * i, seed=40 + i), OUTPUT, **GREEDY) for i in range(4)]
    return messages + [
        request(random_prompt(20 + 5 * i, seed=50 + i), OUTPUT, **(SEEDED | {"seed": i})) for i in range(4)
    ]


@pytest.fixture(scope="module")
def undisturbed(shared: Cluster) -> list[Answer]:
    return generate(shared.address, load())


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("failover")) as cluster:
        cluster.start_executor("a", tiny)
        # However long a busy machine takes to start a process again.
        cluster.start_scheduler("--core-down-limit", "300", "--wait-for-executor", "300")
        cluster.wait_ready()
        yield cluster


def disturbed(cluster: Cluster, act: Callable[[], object]) -> list[Answer]:
    """The load, with ``act`` done (on another thread) once the first stream has some tokens and is not yet done."""
    acts: list[Future[object]] = []

    def watch(index: int, answer: Answer) -> None:
        if index == 0 and len(answer.ids) >= KILL_AFTER and not acts:
            assert len(answer.ids) < OUTPUT - 10, "too late to disturb anything"
            acts.append(pool.submit(act))

    with ThreadPoolExecutor(1) as pool:
        answers = generate(cluster.address, load(), watch)
        acts[0].result()
    return answers


def test_executor_killed_and_restarted(cluster: Cluster, tiny: Path, undisturbed: list[Answer]) -> None:
    def act() -> None:
        cluster.kill("a")
        cluster.executors["a"].wait()
        cluster.start_executor("a", tiny)

    assert ids(disturbed(cluster, act)) == ids(undisturbed)
    settled(cluster)


def test_second_executor_takes_over(
    cluster: Cluster, tiny: Path, undisturbed: list[Answer], alone: list[Answer]
) -> None:
    """The one that takes over runs with overlap: both ways give the same tokens, also within one stream."""
    cluster.start_executor("b", tiny, "--overlap")
    cluster.wait_ready(2)
    answers = disturbed(cluster, lambda: cluster.kill("a"))
    assert ids(answers) == ids(undisturbed)
    cluster.executors["a"].wait()
    assert ids(generate(cluster.address, common_requests())) == ids(alone)
    settled(cluster)


def test_core_killed(cluster: Cluster, undisturbed: list[Answer]) -> None:
    pid = cluster.pids("core")[0]
    answers = disturbed(cluster, lambda: cluster.kill("core"))
    assert ids(answers) == ids(undisturbed)
    cluster.wait_replaced("core", pid)
    cluster.wait_ready()
    settled(cluster)


def test_api_worker_killed(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """Every call breaks off; the client library continues each on the new worker."""
    pid = cluster.pids("api")[0]
    killed = threading.Event()

    def run(message: pb.GenerateRequest) -> tuple[Completion, int]:
        prompt = list(message.token_ids.ids)
        sampling = {field.name: value for field, value in message.sampling.ListFields()}
        with client.stream(prompt, max_tokens=OUTPUT, ignore_eos=True, **sampling) as stream:
            seen = 0
            for chunk in stream:
                seen += len(chunk.token_ids)
                if seen >= KILL_AFTER and not killed.is_set():
                    killed.set()
                    cluster.kill("api", signal.SIGKILL)
            return stream.result(), stream.continuations

    with cluster.client(retry_for=300.0) as client, ThreadPoolExecutor(len(load())) as pool:
        results = list(pool.map(run, load()))
    assert [list(completion.choices[0].token_ids) for completion, _ in results] == ids(undisturbed)
    assert [completion.text for completion, _ in results] == [answer.text for answer in undisturbed]
    assert sum(continuations for _, continuations in results) > 0
    cluster.wait_replaced("api", pid)
    settled(cluster)
