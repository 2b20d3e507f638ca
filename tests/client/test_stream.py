"""The client against a server that breaks off: nothing lost, nothing repeated."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from protos.stepwire.v1 import inference_pb2 as pb
from stepwire import AsyncClient, Client, Completion, RequestError
from tests.client.fake_server import Break, FakeServer, dead_address, expected_ids, expected_text

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def generate(kind: str, address: str, **parameters: object) -> tuple[Completion, str, int]:
    """(completion, the text of choice 0 as the chunks gave it, continuations) by the blocking or the asyncio client."""
    if kind == "sync":
        with Client(address) as client, client.stream("hi", **parameters) as stream:  # type: ignore[arg-type]
            text = "".join(chunk.text for chunk in stream if chunk.index == 0)
            return stream.result(), text, stream.continuations

    async def run() -> tuple[Completion, str, int]:
        async with AsyncClient(address) as client, client.stream("hi", **parameters) as stream:  # type: ignore[arg-type]
            text = "".join([chunk.text async for chunk in stream if chunk.index == 0])
            return await stream.result(), text, stream.continuations

    return asyncio.run(run())


both = pytest.mark.parametrize("kind", ["sync", "aio"])


@both
def test_a_whole_stream(kind: str) -> None:
    with FakeServer() as server:
        completion, text, continuations = generate(kind, server.address, max_tokens=6, seed=5)
    assert text == completion.text == expected_text(5, 0, 6)
    assert completion.choices[0].token_ids == expected_ids(5, 0, 6)
    assert completion.choices[0].finish.reason == "length"
    assert completion.usage.completion_tokens == 6
    assert completion.usage.cached_tokens == 2
    assert completion.started.seed == 5
    assert continuations == 0


@both
@pytest.mark.parametrize("after", range(8))
def test_continues_after_a_break_at_every_message(kind: str, after: int) -> None:
    with FakeServer(script=[Break(after)]) as server:
        completion, text, _ = generate(kind, server.address, max_tokens=6)
        requests = server.requests
    assert text == completion.text == expected_text(77, 0, 6)
    assert completion.choices[0].token_ids == expected_ids(77, 0, 6)
    assert completion.usage.completion_tokens == 6
    if after == 0:  # nothing was received: the same call again
        assert not requests[1].continue_from
        assert requests[1] == requests[0]
    elif after < 6:
        again = requests[1]
        assert list(again.continue_from[0].token_ids) == list(expected_ids(77, 0, after))
        assert again.sampling.seed == 77  # the one drawn by the server
        assert again.request_id == "drawn-1"
        assert again.text == "hi"
    else:  # all tokens and the finish came; only the last message is missing
        assert len(requests) == 1
        assert completion.usage.cached_tokens == (None if after == 6 else 2)


@both
def test_choices_that_ended_are_not_run_again(kind: str) -> None:
    with FakeServer(script=[Break(5), Break(0), Break(1)]) as server:
        completion, _, continuations = generate(kind, server.address, max_tokens=6, n=3, seed=1)
        again = server.requests[1].continue_from
    for index, choice in enumerate(completion.choices):
        assert choice.token_ids == expected_ids(1, index, 6 - index)
        assert choice.text == expected_text(1, index, 6 - index)
    assert [(choice.index, len(choice.token_ids), choice.finished) for choice in again] == [
        (0, 5, False),
        (1, 5, True),
        (2, 4, True),
    ]
    assert continuations == 1  # the second attempt was refused, and the third broke after the last finish


@both
def test_an_end_without_the_last_message_is_a_break(kind: str) -> None:
    with FakeServer(script=[Break(3, code=None)]) as server:
        completion, _, continuations = generate(kind, server.address, max_tokens=6)
    assert completion.text == expected_text(77, 0, 6)
    assert continuations == 1


@both
def test_several_tokens_a_message(kind: str) -> None:
    with FakeServer(script=[Break(2)], tokens_per_message=4) as server:
        completion, _, _ = generate(kind, server.address, max_tokens=11)
    assert completion.text == expected_text(77, 0, 11)


@both
def test_refusals_are_not_tried_again(kind: str) -> None:
    with (
        FakeServer(script=[Break(0, code=grpc.StatusCode.INVALID_ARGUMENT)]) as server,
        pytest.raises(RequestError) as caught,
    ):
        generate(kind, server.address, max_tokens=6)
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message == "as the script says"
    assert len(server.requests) == 1


@both
def test_a_full_queue_is_tried_again_when_the_server_says_when(kind: str) -> None:
    full = grpc.StatusCode.RESOURCE_EXHAUSTED
    with FakeServer(script=[Break(0, full, pushback_ms="5"), Break(0, full, pushback_ms="5")]) as server:
        completion, _, _ = generate(kind, server.address, max_tokens=2)
        assert completion.usage.completion_tokens == 2
        assert len(server.requests) == 3


@both
@pytest.mark.parametrize("pushback", [None, "-1", "soon"])
def test_a_full_queue_without_a_time_is_an_error(kind: str, pushback: str | None) -> None:
    with FakeServer(script=[Break(0, grpc.StatusCode.RESOURCE_EXHAUSTED, pushback_ms=pushback)]) as server:
        with pytest.raises(RequestError):
            generate(kind, server.address, max_tokens=2)
        assert len(server.requests) == 1


@both
def test_addresses_are_taken_in_turn_and_a_stream_moves_to_the_next(kind: str) -> None:
    with FakeServer(script=[Break(3)]) as one, FakeServer() as two:
        completion, _, _ = generate(kind, f"{one.address},{two.address}", max_tokens=6)
        assert completion.text == expected_text(77, 0, 6)
        assert (len(one.requests), len(two.requests)) == (1, 1)
        assert len(two.requests[0].continue_from[0].token_ids) == 3


def test_calls_alternate_between_addresses() -> None:
    with FakeServer() as one, FakeServer() as two, Client([one.address, two.address]) as client:
        for _ in range(4):
            client.generate("hi", max_tokens=1)
        assert (len(one.requests), len(two.requests)) == (2, 2)


@both
def test_a_dead_address_costs_nothing_but_a_turn(kind: str) -> None:
    dead = dead_address()
    with FakeServer() as alive:
        completion, _, _ = generate(kind, f"{dead},{alive.address}", max_tokens=3)
    assert completion.usage.completion_tokens == 3


def test_a_server_killed_mid_stream_and_started_again_elsewhere() -> None:
    with FakeServer(hold=True) as one, FakeServer() as two, Client([one.address, two.address]) as client:
        stream = client.stream("hi", max_tokens=6)
        first = next(stream)
        threading.Thread(target=one.stop).start()
        assert first.text + "".join(chunk.text for chunk in stream) == expected_text(77, 0, 6)
        assert stream.continuations == 1


def test_gives_up_after_retry_for_without_progress() -> None:
    dead = dead_address()
    with Client(dead, retry_for=0.2) as client, pytest.raises(RequestError) as caught:
        client.generate("hi", max_tokens=3)
    assert caught.value.code == UNAVAILABLE


def test_the_deadline_covers_all_attempts() -> None:
    dead = dead_address()
    with Client(dead) as client, pytest.raises(RequestError) as caught:
        client.generate("hi", max_tokens=3, timeout=0.3)
    assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED


def test_the_deadline_reaches_the_server() -> None:
    with FakeServer() as server, Client(server.address) as client:
        client.generate("hi", max_tokens=1, timeout=20.0)
        assert 0 < server.deadlines[0] <= 20.1  # on the wire it is rounded up, to three digits


def test_leaving_the_stream_cancels_the_call() -> None:
    with FakeServer(hold=True) as server, Client(server.address) as client:
        with client.stream("hi", max_tokens=6) as stream:
            next(stream)
        assert server.cancelled.wait(60)


def test_cancelling_the_task_cancels_the_call() -> None:
    async def run(server: FakeServer) -> None:
        async with AsyncClient(server.address) as client:
            stream = client.stream("hi", max_tokens=6)
            await anext(stream)
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)  # let it start
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with FakeServer(hold=True) as server:
        asyncio.run(run(server))
        assert server.cancelled.wait(60)


@both
def test_a_continuation_with_another_seed_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(script=[Break(2)]) as server:
        messages = server._messages

        def reseed(request: pb.GenerateRequest):  # type: ignore[no-untyped-def]
            for message in messages(request):
                if request.continue_from and message.HasField("started"):
                    message.started.seed += 1
                yield message

        monkeypatch.setattr(server, "_messages", reseed)
        with pytest.raises(RequestError) as caught:
            generate(kind, server.address, max_tokens=6)
    assert caught.value.code == grpc.StatusCode.DATA_LOSS


@both
def test_models(kind: str) -> None:
    async def run(address: str) -> list:
        async with AsyncClient(address) as client:
            return await client.models()

    dead = dead_address()
    with FakeServer() as server:
        address = f"{dead},{server.address}"
        if kind == "sync":
            with Client(address) as client:
                models = client.models()
        else:
            models = asyncio.run(run(address))
    assert [(m.name, m.temperature, m.eos_token_ids, m.executors_expected) for m in models] == [("fake", 0.5, (2,), 2)]
