"""The order in which a worker serves its streams, and the credit that it gives."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from scheduler_svc.api.stream import Stream
from scheduler_svc.api.token_flow import TokenFlow
from tests.api.rig import ANSWER_IDS, decoded, rig, run_async, text_request


class FakeStream:
    """Notes when it is woken."""

    def __init__(self, order: list[str], name: str, *, fresh: bool = False, tokens: int = 1) -> None:
        self.order, self.name, self.fresh, self.unlooked = order, name, fresh, tokens

    def look(self, number: int, seen: list[tuple[int, int, int]]) -> list[front.Stop]:
        seen.append((number, 0, self.unlooked))
        return []

    def wake(self) -> None:
        self.order.append(self.name)


def flow_of(streams: list[FakeStream], sent: list[front.ToCore]) -> TokenFlow:
    numbers = cast("dict[Stream, int]", {stream: i + 1 for i, stream in enumerate(streams)})
    return TokenFlow(65536, sent.append, numbers)


def test_new_streams_go_first_and_the_others_in_turn() -> None:
    order: list[str] = []
    streams = [FakeStream(order, f"old{i}") for i in range(20)]
    new = FakeStream(order, "new", fresh=True)
    flow = flow_of([*streams, new], [])
    for stream in [*streams, new, streams[0]]:
        flow.touch(cast(Any, stream))
    asyncio.run(flow.serve(0.0))
    assert order == ["new", *(f"old{i}" for i in range(7))]
    flow.touch(cast(Any, streams[0]))
    asyncio.run(flow.serve(10.0))
    assert order[8:] == [*(f"old{i}" for i in range(7, 20)), "old0"]
    assert not flow


def test_credit_is_for_tokens_looked_at_and_the_allowance_follows_the_choices() -> None:
    sent: list[front.ToCore] = []
    streams = [FakeStream([], f"s{i}", tokens=10) for i in range(64)]
    flow = flow_of(streams, sent)
    flow.credit()
    assert sent == [front.Credit(0, 128)]  # far less than the window from the beginning
    flow.choices = 64
    flow.came(700, 60)
    for stream in streams:
        flow.touch(cast(Any, stream))
    asyncio.run(flow.serve(0.0))
    assert [message for message in sent if isinstance(message, front.Credit)][1:] == [front.Credit(140, 2048)]
    sent.clear()
    asyncio.run(flow.serve(10.0))
    assert [message.tokens for message in sent if isinstance(message, front.Credit)] == [700]


@run_async
async def test_a_stop_string_that_a_message_was_made_with_is_still_told() -> None:
    """A writer may come to the tokens before it is their turn to be looked at."""
    async with rig() as r:
        r.core.auto = False
        count = next(k for k in range(len(ANSWER_IDS)) if "lazy" in decoded(ANSWER_IDS[:k]))
        call = r.stub.GenerateStream(text_request(stopping=pb.Stopping(max_tokens=60, stop=["lazy"])))
        await r.core.until(lambda: r.core.runs)
        (stream,) = r.server.link.open
        stream.on_tokens(0, list(ANSWER_IDS[:count]))
        message = stream.take()
        assert message is not None
        assert message.choices[0].finish.stop == "lazy"
        seen: list[tuple[int, int, int]] = []
        assert stream.look(5, seen) == [front.Stop(5, 0, count)]
        assert stream.look(5, seen) == []
        assert not seen
        call.cancel()
        await r.core.until(lambda: not r.core.runs)
