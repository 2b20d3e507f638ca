"""Tenants in virtual time: limits, ids and prefixes of their own, what operators may do."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import front
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.tenant_limits import Limits, LimitsFile, load_limits
from scheduler_svc.core.tenants import Tenants
from tests.core.test_front import rejection, simple_world
from tests.core.world import SimWorker, World

PROMPT = list(range(1, 40))


def limited(**limits: object) -> tuple[World, SimWorker]:
    """A world in which the tenant ``small`` has these limits."""
    world, worker = simple_world()
    world.core.tenants = Tenants(LimitsFile(tenants={"small": Limits(**limits)}))  # type: ignore[arg-type]
    world.core.streams._tenants = world.core.tenants
    return world, worker


def end(worker: SimWorker, number: int) -> front.Finished | front.Failed | front.Rejected:
    return worker.ends[(number, 0)]


def test_requests_in_flight() -> None:
    world, worker = limited(max_requests=2)
    first = [worker.submit([1], 4, tenant="small") for _ in range(2)]
    third = worker.submit([1], 4, tenant="small")
    refused = rejection(worker, third)
    assert (refused.code, refused.field) == (front.RESOURCE_EXHAUSTED, "tenant.max_requests")
    assert (refused.value, refused.limit, refused.retry_after) == ("2", "2", 1.0)
    other = worker.submit([1], 4, tenant="other")
    world.run_all()
    assert all(isinstance(end(worker, number), front.Finished) for number in [*first, other])
    worker.submit([1], 4, tenant="small")
    world.run_all()
    assert len([e for e in worker.ends.values() if isinstance(e, front.Finished)]) == 4


def test_limits_may_change_while_requests_run() -> None:
    world, worker = limited(max_requests=1)
    first = worker.submit([1], 50, tenant="small")
    assert rejection(worker, worker.submit([1], 4, tenant="small")).field == "tenant.max_requests"
    world.core.on_limits(LimitsFile(tenants={"small": Limits(max_requests=2, tokens_per_second=10.0)}))
    assert worker.submit([1], 4, tenant="small") in worker.accepted
    assert rejection(worker, worker.submit([1], 4, tenant="small")).limit == "2"
    world.run_all()
    assert isinstance(end(worker, first), front.Finished)
    assert not check_all(world.core)


def test_continuations_pass_up_to_twice_the_limit() -> None:
    world, worker = limited(max_requests=1)
    worker.submit([1], 50, tenant="small", request_id="a")
    number = worker.submit([1], 50, tenant="small", outputs={0: [5]}, continuation=True)
    assert number in worker.accepted
    refused = rejection(worker, worker.submit([1], 50, tenant="small", outputs={0: [5]}, continuation=True))
    assert refused.limit == "2"
    # One that replaces a live request is not one more.
    assert (
        worker.submit([1], 50, tenant="small", request_id="a", outputs={0: [5]}, continuation=True) in worker.accepted
    )
    world.run_all()


def test_queued_tokens() -> None:
    world, worker = limited(max_queued_tokens=100)
    never = rejection(worker, worker.submit(list(range(1, 102)), 4, tenant="small"))
    assert (never.code, never.value, never.limit) == (front.INVALID_ARGUMENT, "101", "100")
    for session in list(world.executors):
        world.core.fleet.sessions[session].status = type(world.core.fleet.sessions[session].status).DRAINING
    accepted = [worker.submit(PROMPT, 4, tenant="small") for _ in range(2)]
    assert worker.accepted >= set(accepted)
    refused = rejection(worker, worker.submit(PROMPT, 4, tenant="small"))
    assert (refused.code, refused.field) == (front.RESOURCE_EXHAUSTED, "tenant.max_queued_tokens")
    assert (refused.value, refused.limit) == ("117", "100")
    assert worker.submit(PROMPT, 4, tenant="other") in worker.accepted
    assert not check_all(world.core)


def test_token_rate_is_a_bucket_with_debt() -> None:
    world, worker = limited(tokens_per_second=10.0, burst=30.0)
    number = worker.submit(PROMPT[:20], 20, tenant="small")
    world.run_all()
    assert isinstance(end(worker, number), front.Finished)
    refused = rejection(worker, worker.submit([1], 1, tenant="small"))
    assert (refused.code, refused.field) == (front.RESOURCE_EXHAUSTED, "tenant.tokens_per_second")
    assert 0.5 < refused.retry_after <= 1.2  # 10 tokens ahead of 10 a second
    world.now += refused.retry_after + 0.01
    assert worker.submit([1], 1, tenant="small") in worker.accepted
    world.run_all()


def test_a_running_request_is_charged_while_it_runs() -> None:
    file = LimitsFile(default=Limits(tokens_per_second=10.0, burst=30.0))
    tenants = Tenants(file)

    class Running:
        tenant = "t"
        charged = 0
        sequences: dict = {0: type("S", (), {"num_outputs": 0})()}  # noqa: RUF012

    stream = Running()
    tenants.opened(stream, 25, 100.0)  # type: ignore[arg-type]
    stream.sequences[0].num_outputs = 15
    (row,) = tenants.describe({}, 100.1)
    assert row["token_credit"] == pytest.approx(30 - 25 + 1 - 15)
    tenants.closed(stream)  # type: ignore[arg-type]
    assert tenants.live() == set()
    tenants.forget_idle(101.0)
    assert tenants._accounts
    tenants.forget_idle(110.0)
    assert not tenants._accounts


def test_ids_and_prefixes_belong_to_their_tenant() -> None:
    world, worker = simple_world()
    first = worker.submit(PROMPT, 60, tenant="a", request_id="same")
    second = worker.submit(PROMPT, 60, tenant="b", request_id="same")
    # A continuation of b's does not end a's.
    third = worker.submit(PROMPT, 60, tenant="b", request_id="same", outputs={0: [7]}, continuation=True)
    world.run_all()
    assert isinstance(end(worker, first), front.Finished)
    assert isinstance(end(worker, second), front.Failed)
    assert isinstance(end(worker, third), front.Finished)
    again = [worker.submit(PROMPT, 1, tenant=tenant) for tenant in ("a", "c")]
    world.run_all()
    cached = [end(worker, number) for number in again]
    assert [message.cached_tokens > 0 for message in cached if isinstance(message, front.Finished)] == [True, False]


def test_operators_flush_drain_and_ask_why() -> None:
    world, worker = simple_world()
    number = worker.submit(PROMPT, 2)
    world.run_all()
    assert isinstance(end(worker, number), front.Finished)

    def control(action: str, executor: str = "") -> dict[str, object]:
        worker.send(front.Control(5, action, executor))
        return next(m.body for m in reversed(worker.messages) if isinstance(m, front.Status))

    (state,) = world.core.fleet.sessions.values()
    assert state.pool.cached > 0
    assert control(front.FLUSH_PREFIX_CACHE)["blocks"] > 0
    assert state.pool.cached == 0
    assert not check_all(world.core)
    again = worker.submit(PROMPT, 1)
    world.run_all()
    assert end(worker, again).cached_tokens == 0  # type: ignore[union-attr]
    assert control(front.DRAIN_EXECUTOR, "nobody")["error"]
    assert control("dance", state.name)["error"]
    assert control(front.DRAIN_EXECUTOR)["error"]
    worker.submit([1], 3, request_id="waits", model="unknown")
    answer = control(front.DRAIN_EXECUTOR, state.name)
    assert (answer["error"], answer["status"]) == ("", "DRAINING")
    worker.send(front.GetStatus(6, "waits"))
    body = next(m.body for m in reversed(worker.messages) if isinstance(m, front.Status))
    assert "no executor of its model" in body["request"]["reason"]  # type: ignore[index]


def test_limits_file(tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    path.write_text('{"default": {"max_requests": 3}, "tenants": {"a": {"tokens_per_second": 5}}}')
    tenants = Tenants(load_limits(path))
    assert tenants.limits("x").max_requests == 3
    assert tenants.limits("a").bucket == 50.0
    for bad in ("{", '{"default": {"max_request": 3}}', '{"default": {"max_requests": -1}}', "[]"):
        path.write_text(bad)
        with pytest.raises(ValueError, match="limits"):
            load_limits(path)
    with pytest.raises(ValueError, match="No such file"):
        load_limits(tmp_path / "absent")
