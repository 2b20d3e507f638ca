"""Work that grows with a request is done some at a time: everybody else has a turn in between."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import cycle, islice
from typing import Any

import grpc
import pytest

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from protos.wire import pack_int32
from scheduler_svc.api import door
from scheduler_svc.api.text.detokenizer import Detokenizer
from scheduler_svc.api.text.lanes import DEAR_IDS, IDS, Lanes
from scheduler_svc.api.text.output import Output
from scheduler_svc.api.text.pieces import PieceTable
from tests.api.fake_core import model_state
from tests.api.rig import ANSWER_IDS, decoded, rig, run_async, text_request, until

MANY = 5 * IDS + 3
LARGE = model_state(context_length=2 * MANY, max_sequence_tokens=2 * MANY)


class Turns:
    """``now``: how often the event loop has come round."""

    now = 0

    async def count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def counted() -> AsyncIterator[Turns]:
    turns = Turns()
    task = asyncio.create_task(turns.count())
    await asyncio.sleep(0)
    try:
        yield turns
    finally:
        task.cancel()


def watch(patch: pytest.MonkeyPatch, owner: Any, name: str, turns: Turns, size: Callable[..., int]) -> Counter[int]:
    """By turn of the loop, the ``size`` of what ``owner.name`` was called with."""
    seen: Counter[int] = Counter()
    original = getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen[turns.now] += size(*args)
        return original(*args, **kwargs)

    patch.setattr(owner, name, spy)
    return seen


@run_async
async def test_of_many_at_long_work_one_does_a_slice_in_a_turn() -> None:
    lanes, done = Lanes(), []
    async with counted() as turns:

        async def work(name: int) -> None:
            async for part in lanes.turns(70, 10):
                done.append((name, part, turns.now))

        await asyncio.gather(*map(work, range(3)))
    lanes.close()
    for name in range(3):
        assert [part for other, part, _ in done if other == name] == [slice(i, i + 10) for i in range(0, 70, 10)]
    assert len({turn for _, _, turn in done}) == len(done) == 21
    assert [name for name, _, _ in done[:6]] == [0, 1, 2, 0, 1, 2]


@run_async
async def test_giant_tokenize_and_detokenize() -> None:
    async with rig() as r, counted() as turns:
        await r.announce(LARGE)
        ids = list(islice(cycle(ANSWER_IDS), MANY))
        with pytest.MonkeyPatch.context() as patch:
            pushed = watch(patch, Detokenizer, "push", turns, lambda self, tokens: len(tokens))
            checked = watch(patch, door, "check_ids", turns, lambda field, ids, *rest: len(ids))
            answer = await r.stub.Detokenize(pb.DetokenizeRequest(ids=ids))
            assert answer.text == decoded(ids)
            for seen in (pushed, checked):
                assert sum(seen.values()) == MANY
                assert max(seen.values()) <= IDS
        with pytest.MonkeyPatch.context() as patch:
            looked_up = watch(patch, PieceTable, "__getitem__", turns, lambda self, token: 1)
            tokenized = await r.stub.Tokenize(pb.TokenizeRequest(text=answer.text, pieces=True))
            assert b"".join(tokenized.pieces).decode() == answer.text
            assert sum(looked_up.values()) == len(tokenized.ids) > 2 * IDS
            assert max(looked_up.values()) <= IDS
        with pytest.raises(grpc.aio.AioRpcError, match=rf"ids\[{MANY}\] is 401"):
            await r.stub.Detokenize(pb.DetokenizeRequest(ids=[*ids, 401]))


@run_async
async def test_giant_prompts_and_continuations() -> None:
    async with rig() as r, counted() as turns:
        await r.announce(LARGE)
        ids = list(islice(cycle(ANSWER_IDS), MANY))
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            sampling=pb.Sampling(temperature=0, allowed_token_ids=range(400, 2, -1)),
            stopping=pb.Stopping(max_tokens=2 * IDS, stop=["never to be seen"]),
            output=pb.Output(prompt_token_ids=True),
            continue_from=[pb.ContinuedChoice(index=0, token_ids=ids[: 2 * IDS - 2])],
        )
        r.core.auto = False
        with pytest.MonkeyPatch.context() as patch:
            checked = watch(patch, door, "check_ids", turns, lambda field, ids, *rest: len(ids))
            matched = watch(patch, Output, "push", turns, lambda self, tokens: len(tokens))
            call = r.stub.GenerateStream(request)
            await r.core.until(lambda: r.core.runs)
            assert sum(checked.values()) >= MANY + 2 * IDS - 2
            assert max(checked.values()) <= IDS
            assert sum(matched.values()) == 2 * IDS - 2
            assert max(matched.values()) <= DEAR_IDS
        (submit,) = r.core.got(front.Submit)
        assert submit.prompt == pack_int32(ids)
        assert submit.choices[0].outputs == pack_int32(ids[: 2 * IDS - 2])
        assert len(submit.block_hashes) == MANY // 16 * 16
        started = await call.read()
        assert list(started.started.prompt_token_ids) == ids
        call.cancel()
        await r.core.until(lambda: not r.core.runs)
        request.continue_from[0].token_ids[IDS + 7] = 401
        with pytest.raises(grpc.aio.AioRpcError, match=rf"continue_from\[0\].token_ids\[{IDS + 7}\] is 401"):
            await r.stub.Generate(request)
        request.token_ids.ids[2 * IDS] = 500
        del request.continue_from[:]
        with pytest.raises(grpc.aio.AioRpcError, match=rf"token_ids\[{2 * IDS}\] is 500"):
            await r.stub.Generate(request)


@run_async
async def test_the_core_s_word_of_an_end_is_looked_at_in_the_stream_s_turn() -> None:
    """However many streams end in one message: taking it in matches nothing."""
    async with rig() as r:
        r.core.auto = False
        request = text_request(stopping=pb.Stopping(max_tokens=60, stop=["never to be seen"]))
        calls = [r.stub.GenerateStream(request) for _ in range(3)]
        await until(lambda: sum(stream.accepted for stream in r.server.link.open) == 3)
        streams = list(r.server.link.open)
        for stream in streams:
            stream.on_tokens(0, ANSWER_IDS[:60])
            stream.on_finished(front.Finished(1, 0, front.LENGTH, 60, 0))
            assert stream.ended
            assert not stream.choices[0].output.ids
        message = streams[0].take()
        assert message is not None
        assert message.choices[0].text == decoded(ANSWER_IDS[:60])
        assert message.choices[0].finish.reason == pb.FINISH_REASON_LENGTH
        assert message.usage.completion_tokens == 60
        assert not streams[1].choices[0].output.ids
        for call in calls:
            call.cancel()
        await r.core.until(lambda: not r.core.runs)


@pytest.mark.parametrize("unary", [False, True])
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ((front.LENGTH, 7), grpc.StatusCode.UNAVAILABLE, "4 tokens here and 7 in the core"),
        ((front.STOP_TEXT, 4), grpc.StatusCode.ABORTED, "cancelled"),
    ],
)
@run_async
async def test_an_end_that_is_none_here_is_an_error(
    end: tuple[int, int], code: grpc.StatusCode, words: str, unary: bool
) -> None:
    """The only choice of an accepted request: the core will say no more of it."""
    async with rig() as r:
        r.core.auto = False
        request = text_request(stopping=pb.Stopping(max_tokens=60))
        call = asyncio.ensure_future(r.stub.Generate(request) if unary else r.stream(request))
        await r.core.until(lambda: r.core.runs)
        ((number, _),) = r.core.runs
        r.core.runs.clear()
        await r.core.send(front.Tokens(pack_int32([number]), pack_int32(ANSWER_IDS[:4]), b"\0", b"\4"))
        await r.core.send(front.Finished(number, 0, end[0], end[1], 0))
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await call
        assert caught.value.code() == code
