"""The API workers' side: the door, credit, stops, cancels, deadlines, continuations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protos import front, step
from protos.wire import pack_int32
from tests.core.sim import SimExecutor, model_card, reference
from tests.core.test_same_tokens import SMALL, assert_reference, requests, submit_all
from tests.core.world import SimWorker, World, simple_world


def rejection(worker: SimWorker, number: int) -> front.Rejected:
    end = worker.ends[(number, 0)]
    assert isinstance(end, front.Rejected), end
    return end


# -- the door ----------------------------------------------------------------------------------------------------------


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    world, worker = simple_world(limits=SMALL)  # 160 tokens
    prompt = rejection(worker, worker.submit([1] * 160, 0))
    assert (prompt.code, prompt.field, prompt.value, prompt.limit) == (front.INVALID_ARGUMENT, "prompt", "160", "159")
    tokens = rejection(worker, worker.submit([1] * 100, 61))
    assert (tokens.code, tokens.field, tokens.limit) == (front.INVALID_ARGUMENT, "max_tokens", "60")
    largest = worker.submit([1] * 100, 60, ignore_eos=True)
    open_ended = worker.submit([1] * 100, 0, ignore_eos=True)
    world.run_all()
    for number in (largest, open_ended):
        assert worker.ends[(number, 0)].reason == front.LENGTH  # type: ignore[union-attr]
        assert len(worker.outputs[(number, 0)]) == 60


def test_max_tokens_beyond_the_context_ends_at_the_context() -> None:
    world = World()
    card = step.ModelCard("m", "sim", "a" * 64, "b" * 64, 512, 50, (0,), ())
    world.add_executor(card=card)
    worker = world.add_worker()
    number = worker.submit([1] * 20, 1000, ignore_eos=True)
    world.run_all()
    assert len(worker.outputs[(number, 0)]) == 30


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "token id": ({"prompt": [1, 512]}, "prompt"),
    "empty": ({"prompt": []}, "prompt"),
    "outputs": ({"outputs": {0: [4, 600]}}, "outputs"),
    "too many outputs": ({"outputs": {0: [4] * 9}}, "outputs"),
    "stop ids": ({"stop_ids": pack_int32([700])}, "stop_ids"),
    "broken array": ({"stop_ids": b"abc"}, "stop_ids"),
    "hashes": ({"block_hashes": b"x" * 15}, "block_hashes"),
    "choice index": ({"outputs": {300: []}}, "choices"),
}


@pytest.mark.parametrize(("change", "field"), BAD.values(), ids=BAD)
def test_bad_submits_are_refused_by_field(change: dict[str, Any], field: str) -> None:
    world, worker = simple_world()
    prompt = change.pop("prompt", [1, 2, 3])
    hashes = change.pop("block_hashes", None)
    number = worker.submit(prompt, 5, hashes=False, **change) if hashes is None else None
    if number is None:
        submit = front.Submit(
            stream=1, request_id="r", model="m", prompt=pack_int32(prompt), choices=(front.Choice(0),),
            sampling=step.SamplingParams(), max_tokens=5, arrival=0.0, block_hashes=hashes,
        )  # fmt: skip
        worker.submits[1] = submit
        worker.send(submit)
        number = 1
    choice = worker.submits[number].choices[0].index
    end = worker.ends[(number, choice)]
    assert isinstance(end, front.Rejected)
    assert (end.code, end.field) == (front.INVALID_ARGUMENT, field)
    assert not world.core.streams.by_request


def test_grammars_are_refused_by_name() -> None:
    _, worker = simple_world()
    submit = front.Submit(
        stream=1, request_id="r", model="m", prompt=pack_int32([1]), choices=(front.Choice(0),),
        sampling=step.SamplingParams(grammar="g"), max_tokens=5, arrival=0.0,
    )  # fmt: skip
    worker.submits[1] = submit
    worker.send(submit)
    assert rejection(worker, 1).field == "grammar"


def test_a_full_queue_refuses_new_work_but_not_continuations() -> None:
    world, worker = simple_world(limits=step.Limits(40, 4, 1, 64), max_waiting=2)
    numbers = [worker.submit([i + 1], 5) for i in range(4)]
    full = rejection(worker, numbers[3])
    assert full.code == front.RESOURCE_EXHAUSTED
    assert full.retry_after > 0
    continued = worker.submit([9], 5, outputs={0: reference([9], 2)})
    assert (continued, 0) not in worker.ends
    world.run_all()


def test_a_live_request_id_is_refused_unless_it_continues() -> None:
    world, worker = simple_world()
    other = world.add_worker("w1")
    first = worker.submit([1, 2], 20, request_id="r", ignore_eos=True)
    (session,) = world.executors
    for _ in range(4):
        world.run(session)
    assert rejection(worker, worker.submit([1, 2], 5, request_id="r")).code == front.ALREADY_EXISTS
    again = other.submit([1, 2], 20, request_id="r", outputs={0: reference([1, 2], 3)}, ignore_eos=True)
    fenced = worker.ends[(first, 0)]
    assert isinstance(fenced, front.Failed)
    assert fenced.code == front.ABORTED
    world.run_all()
    assert other.outputs[(again, 0)] == reference([1, 2], 20, ignore_eos=True)


def test_a_number_that_is_taken_is_not_given_twice() -> None:
    world, worker = simple_world(startup_grace=10.0)
    live = worker.submit([1, 2], 20, ignore_eos=True)
    early = worker.submit([1, 2], 5, model="late")
    for number in (live, early):
        worker.send(msgspec.structs.replace(worker.submits[live], stream=number, request_id="other"))
    worker.send(msgspec.structs.replace(worker.submits[early], continuation=True))
    assert world.core.counters["malformed"] == 3
    assert list(world.core.streams.by_request) == [("", f"w0-{live}")]
    assert [key[1] for key in world.core.front_desk.early] == [early]
    world.add_executor(SimExecutor("e1", 2, model_card("late")))
    world.run_all()
    assert_reference(worker)


@pytest.mark.parametrize("waits", [False, True])
def test_a_continuation_takes_the_place_of_its_number_and_of_its_id(waits: bool) -> None:
    """Under the same number nobody is told of an end: it would look like the end of the new one."""
    world, worker = simple_world(limits=SMALL)
    other = world.add_worker("w1")
    (session,) = world.executors
    same_number = worker.submit([1, 2], 30, request_id="a", ignore_eos=True)
    same_id = other.submit([1, 2], 30, request_id="b", ignore_eos=True)
    assert same_number == same_id == 1  # the numbers are each worker's own
    if not waits:
        for _ in range(4):
            world.run(session)
    worker.accepted.clear()
    had = worker.outputs[(same_number, 0)][:2]
    worker.outputs[(same_number, 0)] = list(had)
    again = msgspec.structs.replace(
        worker.submits[same_number], request_id="b", continuation=True, choices=(front.Choice(0, pack_int32(had)),)
    )
    worker.send(again)
    assert not worker.ends
    fenced = other.ends[(same_id, 0)]
    assert isinstance(fenced, front.Failed)
    assert fenced.code == front.ABORTED
    assert list(world.core.streams.by_request) == [("", "b")]
    other.send(front.Cancel(same_id))  # too late, and of another worker's number
    freed = other.submit([5], 5, request_id="a", ignore_eos=True)
    world.run_all()
    assert worker.outputs[(same_number, 0)] == reference([1, 2], 30, ignore_eos=True)
    assert other.outputs[(freed, 0)] == reference([5], 5, ignore_eos=True)
    assert world.core.streams.failed == 1


def test_a_continuation_of_itself_under_its_own_number_is_one_stream() -> None:
    world, worker = simple_world()
    number = worker.submit([1, 2], 20, deadline=world.now + 50.0, ignore_eos=True, outputs={0: [], 1: []})
    (session,) = world.executors
    for _ in range(4):
        world.run(session)
    worker.accepted.clear()
    for choice in (0, 1):
        worker.outputs[(number, choice)] = []
    worker.send(msgspec.structs.replace(worker.submits[number], continuation=True, deadline=0.0))
    assert not worker.ends
    assert world.core.streams.next_deadline() is None  # the one that had it is over
    world.run_all()
    assert_reference(worker)


def test_an_unknown_model_waits_only_in_the_start_up_grace() -> None:
    world = World(startup_grace=10.0)
    worker = world.add_worker()
    early = worker.submit([1, 2], 5, model="late")
    assert (early, 0) not in worker.ends
    never = worker.submit([1, 2], 5, model="never")
    continued = worker.submit([1, 2], 5, model="back", outputs={0: [4]})
    world.tick(5.0)
    world.add_executor(card=model_card("late"))
    world.drain_plans()
    assert worker.outputs[(early, 0)] == reference([1, 2], 5)
    world.tick(6.0)
    assert rejection(worker, never).code == front.NOT_FOUND
    assert rejection(worker, worker.submit([1], 5, model="never")).code == front.NOT_FOUND
    world.tick(30.0)
    assert rejection(worker, continued).code == front.UNAVAILABLE


def test_without_executors_requests_of_a_known_model_wait_bounded() -> None:
    world, worker = simple_world(wait_for_executor=30.0)
    (session,) = world.executors
    executor = world.kill_executor(session)
    lost = worker.submit([1, 2], 5)
    world.tick(29.0)
    kept = worker.submit([1, 3], 5)
    world.tick(3.0)
    end = worker.ends[(lost, 0)]
    assert isinstance(end, front.Failed)
    assert end.code == front.UNAVAILABLE
    executor.instance += 1
    world.add_executor(executor)
    world.run_all()
    assert worker.outputs[(kept, 0)] == reference([1, 3], 5)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 6])
def test_cancel_frees_slot_and_blocks_within_one_step(steps: int) -> None:
    world, worker = simple_world(limits=SMALL)
    (session,) = world.executors
    numbers = [worker.submit(list(range(1, 20)), 40, ignore_eos=True, outputs={0: [], 1: []}) for _ in range(2)]
    for _ in range(steps):
        world.run(session)
    worker.send(front.Cancel(numbers[0]))
    for choice in (0, 1):
        end = worker.ends[(numbers[0], choice)]
        assert isinstance(end, front.Finished)
        assert end.reason == front.CANCELLED
    (state,) = world.core.fleet.sessions.values()
    assert all(s.stream.number == numbers[1] for s in state.residents())
    world.run_all()
    assert worker.outputs[(numbers[1], 0)] == reference(list(range(1, 20)), 40, ignore_eos=True)
    assert world.core.committer.dropped_rows <= 4  # depth 2, two choices


def test_a_passed_deadline_ends_waiting_and_running_requests() -> None:
    world, worker = simple_world(limits=step.Limits(40, 4, 1, 64))
    running = worker.submit([1], 100, ignore_eos=True, deadline=world.now + 1.0)
    waiting = worker.submit([2], 5, deadline=world.now + 2.0)
    late = worker.submit([2], 5, deadline=world.now - 1.0)
    assert rejection(worker, late).code == front.DEADLINE_EXCEEDED
    world.tick(0.9)
    assert (running, 0) not in worker.ends
    world.tick(0.11)
    assert worker.ends[(running, 0)].code == front.DEADLINE_EXCEEDED  # type: ignore[union-attr]
    world.tick(1.0)
    assert worker.ends[(waiting, 0)].code == front.DEADLINE_EXCEEDED  # type: ignore[union-attr]
    world.drain_plans()


def test_a_text_stop_ends_the_choice_where_the_worker_says() -> None:
    world, worker = simple_world(text_run_ahead=8)
    (session,) = world.executors
    number = worker.submit([1, 2], 100, ignore_eos=True, stops_on_text=True)
    for _ in range(30):
        world.run(session)
    assert len(worker.outputs[(number, 0)]) == 8  # no further without a word from the worker
    worker.send(front.Seen(pack_int32([number]), pack_int32([0]), pack_int32([6])))
    for _ in range(30):
        world.run(session)
    assert len(worker.outputs[(number, 0)]) == 14
    worker.send(front.Stop(number, 0, 11))
    end = worker.ends[(number, 0)]
    assert isinstance(end, front.Finished)
    assert (end.reason, end.outputs) == (front.STOP_TEXT, 11)
    worker.send(front.Stop(number, 0, 9))
    worker.send(front.Cancel(number))
    world.run_all()


# -- credit ------------------------------------------------------------------------------------------------------------


def test_a_worker_without_credit_stops_alone() -> None:
    world, worker = simple_world(limits=step.Limits(200, 4, 16, 64))
    slow = world.add_worker("slow", window=10, auto_credit=False)
    slow_numbers = [slow.submit([i + 1], 20, ignore_eos=True) for i in range(4)]
    numbers = [worker.submit([i + 1], 20, ignore_eos=True) for i in range(4)]
    (session,) = world.executors
    for _ in range(60):
        world.run(session)
    assert all((number, 0) in worker.ends for number in numbers)
    assert slow.received == 10
    slow.auto_credit = True
    slow.give_credit()
    world.run_all()
    assert all(len(slow.outputs[(number, 0)]) == 20 for number in slow_numbers)


def test_rows_without_credit_give_way_when_others_need_the_slots() -> None:
    world, worker = simple_world(limits=step.Limits(200, 4, 2, 64))
    slow = world.add_worker("slow", window=6, auto_credit=False)
    for i in range(2):
        slow.submit([i + 1], 20, ignore_eos=True)
    (session,) = world.executors
    for _ in range(10):
        world.run(session)
    assert slow.received == 6
    numbers = [worker.submit([i + 1], 20, ignore_eos=True) for i in range(4)]
    for _ in range(90):
        world.run(session)
    assert all((number, 0) in worker.ends for number in numbers)
    slow.auto_credit = True
    slow.give_credit()
    world.run_all()
    assert all(len(slow.outputs[(number, 0)]) == 20 for number in slow.submits)


def test_past_the_allowance_only_first_tokens_come() -> None:
    world, _ = simple_world(limits=step.Limits(200, 4, 16, 64))
    slow = world.add_worker("slow", window=30, auto_credit=False)
    slow.send(front.Credit(0, 8))
    running = [slow.submit([i + 1], 20, ignore_eos=True) for i in range(2)]
    (session,) = world.executors
    for _ in range(20):
        world.run(session)
    assert slow.received == 8
    new = [slow.submit([i + 11], 20, ignore_eos=True) for i in range(3)]
    for _ in range(20):
        world.run(session)
    assert [len(slow.outputs[(number, 0)]) for number in new] == [1, 1, 1]
    assert slow.received == 11
    slow.allowance = 1000  # no more than the window
    slow.give_credit()
    for _ in range(60):
        world.run(session)
    assert slow.received == 11 + 30
    slow.auto_credit = True
    slow.give_credit()
    world.run_all()
    assert all(len(slow.outputs[(number, 0)]) == 20 for number in (*running, *new))


def test_rows_past_the_allowance_give_way_only_when_their_worker_stands_still() -> None:
    world, worker = simple_world(limits=step.Limits(200, 4, 2, 64))
    slow = world.add_worker("slow", window=100, auto_credit=False)
    slow.send(front.Credit(0, 4))
    held = slow.submit([1], 20, ignore_eos=True)
    (session,) = world.executors
    for _ in range(10):
        world.run(session)
    assert slow.received == 4
    numbers = [worker.submit([i + 1], 20, ignore_eos=True) for i in range(2)]
    for _ in range(10):
        world.run(session)
    assert world.core.residency.preemptions == 0
    assert not worker.outputs[(numbers[1], 0)]
    world.now += 2.0
    for _ in range(10):
        world.run(session)
    assert world.core.residency.preemptions == 1
    assert worker.outputs[(numbers[1], 0)]
    slow.auto_credit = True
    slow.give_credit()
    world.run_all()
    assert len(slow.outputs[(held, 0)]) == 20


# -- workers -----------------------------------------------------------------------------------------------------------


def test_a_gone_worker_leaves_nothing_behind() -> None:
    world, worker = simple_world(limits=SMALL)
    other = world.add_worker("w1")
    submit_all(world, worker, requests(6))
    submit_all(world, other, requests(6, seed=2))
    (session,) = world.executors
    for _ in range(3):
        world.run(session)
    del world.workers[worker.peer]
    world.core.on_worker_gone(worker.peer, world.now)
    world.settle()
    world.run_all()
    assert_reference(other)
    assert not world.core.streams.by_request


def test_detach_by_the_supervisor_and_attach_again() -> None:
    world, worker = simple_world()
    worker.submit([1, 2], 50, ignore_eos=True)
    world.core.on_front(b"supervisor", front.Detach("w0", 8), world.now)
    assert world.core.streams.by_request  # another incarnation: not this one
    world.core.on_front(b"supervisor", front.Detach("w0", 7), world.now)
    assert not world.core.streams.by_request
    worker.messages.clear()
    worker.send(front.Cancel(1))
    assert [type(m) for m in worker.messages] == [front.Reattach]
    worker.attach()
    assert isinstance(worker.messages[1], front.Attached)
    world.drain_plans()


def test_a_worker_that_attaches_from_a_new_socket_starts_clean() -> None:
    world, worker = simple_world()
    worker.submit([1, 2], 50, ignore_eos=True)
    world.core.on_front(b"new", front.Attach(front.FRONT_VERSION, "w0", 7, 100), world.now)
    world.settle()
    assert not world.core.streams.by_request
    assert [type(m) for m in world.sent[b"new"]] == [front.Attached, front.Models]


def test_silent_peers_are_pinged() -> None:
    world, worker = simple_world()
    (executor,) = world.executors.values()
    worker.messages.clear()
    executor.received.clear()
    world.tick(1.01)
    assert 3 <= sum(isinstance(m, front.Ping) for m in worker.messages) <= 5
    assert 3 <= sum(isinstance(m, step.Ping) for m in executor.received) <= 5


def test_status_tells_why_a_request_waits() -> None:
    _, worker = simple_world(limits=step.Limits(40, 4, 1, 64))
    worker.submit([1], 50, ignore_eos=True)
    worker.submit([2], 50, request_id="second")
    worker.messages.clear()
    worker.send(front.GetStatus(5, "second", True))
    status = next(m for m in worker.messages if isinstance(m, front.Status))
    assert status.ticket == 5
    assert status.body["problems"] == []
    request: Any = status.body["request"]
    assert request["choices"][0]["waits_for"] == "a slot"
    assert request["choices"][0]["state"] == "WAITING"


# -- logprobs ----------------------------------------------------------------------------------------------------------


def test_logprobs_reach_the_stream_and_foreign_ones_nobody() -> None:
    world, worker = simple_world()
    ((session, executor),) = world.executors.items()
    number = worker.submit([1, 2], 3, ignore_eos=True)
    other = world.add_worker("w1")
    other.submit([5, 6], 3, ignore_eos=True)
    answer = executor.run()
    assert isinstance(answer, step.StepResult)
    row = step.RowLogprobs(2, -0.5, 1)
    mine = step.SlotLogprobs(0, 1, (row,))
    foreign = (step.SlotLogprobs(0, 7, (row,)), step.SlotLogprobs(2**31 - 1, 1, (row,)))
    world.from_executor(session, msgspec.structs.replace(answer, logprobs=(mine, *foreign)))
    (tokens,) = (m for m in worker.messages if isinstance(m, front.Tokens))
    ((stream, choice, encoded),) = tokens.logprobs
    assert (stream, choice) == (number, 0)
    assert msgspec.msgpack.decode(encoded, type=tuple[step.RowLogprobs, ...]) == (row,)
    assert not any(m.logprobs for m in other.messages if isinstance(m, front.Tokens))
    world.run_all()


def test_prompt_logprobs_come_without_a_token() -> None:
    world, worker = simple_world(max_prefill_chunk=4)
    ((session, executor),) = world.executors.items()
    number = worker.submit([1, 2, 3, 4, 5, 6], 2, sampling=step.SamplingParams(prompt_logprobs=0))
    answer = executor.run()
    assert isinstance(answer, step.StepResult)
    assert not answer.slots
    logprobs = (step.SlotLogprobs(0, 1, (step.RowLogprobs(1, -0.5, 1),)),)
    world.from_executor(session, msgspec.structs.replace(answer, logprobs=logprobs))
    (tokens,) = (m for m in worker.messages if isinstance(m, front.Tokens))
    assert [entry[:2] for entry in tokens.logprobs] == [(number, 0)]
    assert not tokens.tokens
    world.run_all()


@pytest.mark.parametrize("field", ["arrival", "deadline"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_times_that_are_no_times_are_refused(field: str, value: float) -> None:
    _, worker = simple_world()
    number = worker.submit([1], 2, **{field: value})  # type: ignore[arg-type]
    assert rejection(worker, number).field == field
