"""What a core says to an executor that may choose between schedulers."""

from __future__ import annotations

from protos import front, step
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.outbox import EXECUTOR, Destination
from tests.core.sim import SimExecutor
from tests.core.world import World


def ask(core: Core, model: str) -> step.Need:
    core.on_executor(b"nobody", step.AskNeed(model), 1e9)
    ((destination, answer),) = [item for item in core.take_outbox() if item[0].peer == b"nobody"]
    assert destination == Destination(EXECUTOR, b"nobody")
    assert isinstance(answer, step.Need)
    return answer


def test_a_stranger_may_ask_and_is_no_session() -> None:
    core = Core(CoreConfig(), 1e9)
    assert ask(core, "tiny") == step.Need(0, 0)
    assert not core.fleet.sessions
    assert core.counters["strangers"] == 0


def test_executors_and_requests_of_the_model_are_counted() -> None:
    world = World()
    executor = SimExecutor()
    world.add_executor(executor)
    worker = world.add_worker()
    worker.submit([5, 6, 7], 50)
    assert isinstance(worker.messages[-1], front.Accepted | front.Tokens)
    need = ask(world.core, next(iter(world.core.fleet.models)))
    assert need == step.Need(1, 1)
    assert ask(world.core, "another") == step.Need(0, 0)
