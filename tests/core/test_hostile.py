"""Executors that lie in their Hello, or whose mirror drifts: found, contained, named; no token is wrong."""

from __future__ import annotations

import logging

import msgspec
import pytest

from protos import step
from tests.core.sim import SimExecutor
from tests.core.test_same_tokens import assert_reference, requests, submit_all
from tests.core.world import World

TRUE = step.Limits(8, 4, 4, 64)


class Liar(SimExecutor):
    """States more blocks than it has."""

    def hello(self) -> step.Hello:
        return msgspec.structs.replace(super().hello(), limits=step.Limits(64, 4, 4, 64))


class Drifting(SimExecutor):
    """Forgets that a slot was given another block, now and then."""

    def _execute(self, plan: step.StepPlan, answered: int) -> step.StepResult:
        if plan.seq % 3 == 0:
            self.digest ^= 1
        return super()._execute(plan, answered)


def outcome(world: World, caplog: pytest.LogCaptureFixture, bad: SimExecutor) -> None:
    """Beside an honest executor, a bad one is quarantined, and every request has its own tokens."""
    world.add_executor(bad)
    worker = world.add_worker()
    submit_all(world, worker, requests(12))
    world.add_executor(SimExecutor(name="honest", limits=step.Limits(64, 4, 16, 64)))
    with caplog.at_level(logging.WARNING):
        world.run_all()
    assert_reference(worker)
    assert world.core.counters["epochs_lost"] >= 2
    assert [executor.name for executor in world.core.fleet.sessions.values()] == ["honest"]
    named = [record for record in caplog.records if record.message == "executor quarantined"]
    assert [getattr(record, "executor", "") for record in named] == ["bad"]
    refused = [message for message in bad.received if isinstance(message, step.Refused)]
    assert "quarantined" in refused[-1].reason


def test_more_blocks_than_it_has(caplog: pytest.LogCaptureFixture) -> None:
    outcome(World(), caplog, Liar(name="bad", limits=TRUE, strict=False))


def test_a_mirror_that_drifts(caplog: pytest.LogCaptureFixture) -> None:
    outcome(World(), caplog, Drifting(name="bad", strict=False))


@pytest.mark.parametrize(
    "lie",
    [
        {"vocab_size": 2**40},
        {"vocab_size": 0},
        {"context_length": 2**60},
        {"fingerprint": "short"},
        {"eos_token_ids": tuple(range(100))},
    ],
)
def test_numbers_that_would_size_something_are_no_hello(lie: dict[str, object]) -> None:
    hello = SimExecutor().hello()
    lied = msgspec.structs.replace(hello, model=msgspec.structs.replace(hello.model, **lie))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(lied), type=step.ToCore)
