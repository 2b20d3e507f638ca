from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import Cluster
from tests.e2e.streams import Answer, common_requests, one
from tests.executor.model.tiny import make_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model ``tiny``: random weights, context 4096, a byte-level tokenizer and a chat template."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def other_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model ``other``: other weights."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "other", seed=7)


@pytest.fixture(scope="session")
def shared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One scheduler, one executor of ``tiny``, all defaults; for tests that do it no harm."""
    with Cluster(tmp_path_factory.mktemp("shared")) as cluster:
        cluster.start_executor("first", tiny)
        cluster.start_scheduler()
        cluster.wait_ready()
        yield cluster


@pytest.fixture(scope="session")
def restartable(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One executor of ``tiny`` that stays while tests restart the scheduler with flags of their own."""
    with Cluster(tmp_path_factory.mktemp("restartable")) as cluster:
        cluster.start_executor("only", tiny)
        yield cluster


@pytest.fixture(scope="session")
def alone(shared: Cluster) -> list[Answer]:
    """The answers to ``common_requests``, each run with nothing else in flight: what all others must equal."""
    return [one(shared.address, message) for message in common_requests()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failure shows the end of every live process' log."""
    report = yield
    if report.failed:
        for cluster in harness.live:
            report.sections.append((f"logs under {cluster.folder}", cluster.logs()))
    return report
