"""The three calls, over gRPC against a scripted core."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from protos.wire import unpack_int32
from tests.api.fake_core import EOS, FILES, model_state
from tests.api.rig import ANSWER_IDS, answer_token, decoded, rig, run_async, text_request, until
from tests.api.vocabularies import byte_level


def encode(text: str) -> list[int]:
    return byte_level().encode(text, add_special_tokens=False).ids


@run_async
async def test_stream() -> None:
    async with rig() as r:
        r.core.cached_tokens = 3
        answer = await r.stream(text_request("hello fox", request_id="mine", stopping=pb.Stopping(max_tokens=40)))
        assert answer.started == pb.Started(
            request_id="mine", model="m", seed=answer.started.seed, prompt_tokens=len(encode("hello fox"))
        )
        assert answer.ids == {0: ANSWER_IDS[:40]}
        assert answer.text == {0: decoded(ANSWER_IDS[:40])}
        assert answer.finish == {0: pb.Finish(reason=pb.FINISH_REASON_LENGTH)}
        assert answer.usage == pb.Usage(prompt_tokens=len(encode("hello fox")), completion_tokens=40, cached_tokens=3)
        (submit,) = r.core.got(front.Submit)
        assert unpack_int32(submit.prompt).tolist() == encode("hello fox")
        assert submit.max_tokens == 40
        assert not submit.continuation
        assert len(submit.block_hashes) == 16 * (len(encode("hello fox")) // 16)


@run_async
async def test_started_goes_at_once_and_tokens_gather_while_the_client_is_slow() -> None:
    async with rig() as r:
        r.core.auto = False
        call = r.stub.GenerateStream(text_request(stopping=pb.Stopping(max_tokens=5)))
        first = await call.read()
        assert first.HasField("started")
        assert not first.choices
        await r.core.step()
        second = await call.read()
        assert list(second.choices[0].token_ids) == ANSWER_IDS[:1]
        await r.core.step(per_row=4)
        third = await call.read()
        assert list(third.choices[0].token_ids) == ANSWER_IDS[1:5]
        assert third.choices[0].HasField("finish")
        if not third.HasField("usage"):
            assert (await call.read()).HasField("usage")
        assert await call.read() is grpc.aio.EOF


@run_async
async def test_unary_is_the_stream_put_together() -> None:
    async with rig() as r:
        request = text_request(sampling=pb.Sampling(temperature=0.0, n=3), stopping=pb.Stopping(max_tokens=21))
        answer = await r.stream(request)
        whole = await r.stub.Generate(request)
        assert {c.index: list(c.token_ids) for c in whole.choices} == answer.ids
        assert {c.index: c.text for c in whole.choices} == answer.text
        assert {c.index: c.finish for c in whole.choices} == answer.finish
        assert whole.usage == answer.usage
        assert whole.usage.completion_tokens == 63
        assert answer.ids[2] == ANSWER_IDS[2:23]


@run_async
async def test_many_streams_at_once() -> None:
    async with rig() as r:
        requests = [text_request(f"hello {i}", stopping=pb.Stopping(max_tokens=10 + i)) for i in range(40)]
        answers = await asyncio.gather(*(r.stream(request) for request in requests))
        for i, answer in enumerate(answers):
            assert answer.ids[0] == ANSWER_IDS[: 10 + i]
        # Credit follows (the default window lets little of it show here).
        assert r.server.link._flow.received == sum(10 + i for i in range(40))


@run_async
async def test_credit_is_cumulative() -> None:
    async with rig(link={"window": 64}) as r:
        await r.stream(text_request(stopping=pb.Stopping(max_tokens=60)))
        await r.core.until(lambda: 60 - r.core.got(front.Credit)[-1].tokens < 8)
        credits = [message.tokens for message in r.core.got(front.Credit)]
        assert credits == sorted(set(credits))
        assert credits[-1] <= 60


@run_async
async def test_chat_and_token_ids() -> None:
    async with rig() as r:
        messages = [pb.ChatMessage(role="system", content="be brief"), pb.ChatMessage(role="user", content="hi")]
        chat = pb.GenerateRequest(chat=pb.Chat(messages=messages), stopping=pb.Stopping(max_tokens=2))
        ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), stopping=pb.Stopping(max_tokens=2))
        assert (await r.stream(chat)).started.prompt_tokens > 0
        assert (await r.stream(ids)).started.prompt_tokens == 3
        first, second = r.core.got(front.Submit)
        expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert unpack_int32(first.prompt).tolist() == encode(expected)
        assert unpack_int32(second.prompt).tolist() == [5, 6, 7]
        # Absent sampling fields are the model's own.
        assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.25, 7, 0.5)


@run_async
async def test_seed_is_drawn_once_and_told() -> None:
    async with rig() as r:
        drawn = await r.stream(text_request(sampling=pb.Sampling()))
        given = await r.stream(text_request(sampling=pb.Sampling(seed=2**64 - 1)))
        first, second = r.core.got(front.Submit)
        assert drawn.started.seed == first.sampling.seed
        assert given.started.seed == second.sampling.seed == 2**64 - 1


@pytest.mark.parametrize("stops", [False, True])
@run_async
async def test_eos_and_stop_ids(stops: bool) -> None:
    def tokens(choice: int, position: int) -> int:
        return EOS if position == 4 else answer_token(0, position)

    stop = ["never there"] if stops else []
    async with rig(tokens) as r:
        answer = await r.stream(text_request(stopping=pb.Stopping(stop=stop)))
        assert answer.finish[0] == pb.Finish(reason=pb.FINISH_REASON_STOP, eos_token_id=EOS)
        assert answer.ids[0] == [*ANSWER_IDS[:4], EOS]
        assert answer.text[0] == decoded(ANSWER_IDS[:4])
        assert answer.usage.completion_tokens == 5
        by_id = await r.stream(text_request(stopping=pb.Stopping(stop=stop, stop_token_ids=[ANSWER_IDS[2]])))
        assert by_id.finish[0] == pb.Finish(reason=pb.FINISH_REASON_STOP, stop_token_id=ANSWER_IDS[2])
        assert by_id.text[0] == decoded(ANSWER_IDS[:2])
        past = await r.stream(text_request(stopping=pb.Stopping(stop=stop, ignore_eos=True, max_tokens=9)))
        assert len(past.ids[0]) == 9


@pytest.mark.parametrize("per_row", [1, 3, 7])
@run_async
async def test_stop_string(per_row: int) -> None:
    async with rig() as r:
        r.core.per_row = per_row
        request = text_request(stopping=pb.Stopping(max_tokens=60, stop=["zebra", "over STOP", "STOP"]))
        answer = await r.stream(request)
        assert answer.finish[0] == pb.Finish(reason=pb.FINISH_REASON_STOP, stop="over STOP")
        full = decoded(ANSWER_IDS)
        assert answer.text[0] == full[: full.index("over STOP")]
        assert "over STOP" in decoded(answer.ids[0])
        assert "over STOP" not in decoded(answer.ids[0][:-1])
        (stop,) = r.core.got(front.Stop)
        assert stop.outputs == len(answer.ids[0]) == answer.usage.completion_tokens
        assert not r.core.runs
        seen = [n for message in r.core.got(front.Seen) for n in unpack_int32(message.outputs).tolist()]
        assert seen == sorted(seen)
        assert seen[-1] < stop.outputs
        whole = await r.stub.Generate(request)
        assert whole.choices[0].text == answer.text[0]
        assert whole.choices[0].finish == answer.finish[0]


@run_async
async def test_stop_string_at_the_last_token_beats_length() -> None:
    full = decoded(ANSWER_IDS)
    async with rig() as r:
        count = next(k for k in range(len(ANSWER_IDS)) if "lazy" in decoded(ANSWER_IDS[:k]))
        answer = await r.stream(text_request(stopping=pb.Stopping(max_tokens=count, stop=["lazy"])))
        assert answer.finish[0] == pb.Finish(reason=pb.FINISH_REASON_STOP, stop="lazy")
        assert answer.text[0] == full[: full.index("lazy")]
        one_less = await r.stream(text_request(stopping=pb.Stopping(max_tokens=count - 1, stop=["lazy"])))
        assert one_less.finish[0] == pb.Finish(reason=pb.FINISH_REASON_LENGTH)
        assert one_less.text[0] == decoded(ANSWER_IDS[: count - 1])


@run_async
async def test_continuation_at_every_k_joins_byte_for_byte() -> None:
    stopping = pb.Stopping(max_tokens=30, stop=["dog jumps", "\u4f60\u597d\u4f60"])
    async with rig() as r:
        whole = await r.stream(text_request(stopping=stopping))
        sampling = pb.Sampling(temperature=0.0, seed=whole.started.seed)
        ids = whole.ids[0]
        for k in range(len(ids) + 1):
            again = await r.stream(
                text_request(
                    stopping=stopping,
                    sampling=sampling,
                    continue_from=[pb.ContinuedChoice(index=0, token_ids=ids[:k])],
                )
            )
            assert ids[:k] + again.ids.get(0, []) == ids
            assert whole.text[0].endswith(again.text.get(0, ""))
            assert again.finish == whole.finish
            assert again.usage.completion_tokens == len(ids)
        submits = [s for s in r.core.got(front.Submit) if s.continuation]
        assert len(submits) == len(ids)  # the last one had ended: nothing for the core


@run_async
async def test_continuation_from_what_was_received_so_far() -> None:
    """Cut a stream after each message: what came, and what a continuation brings, are the whole, byte for byte."""
    stopping = pb.Stopping(max_tokens=26, stop=["dog jumps"])
    async with rig() as r:
        whole = await r.stream(text_request(stopping=stopping))
        for cut in range(2, len(whole.ids[0]), 3):
            call = r.stub.GenerateStream(text_request(stopping=stopping))
            ids: list[int] = []
            text = ""
            while len(ids) < cut:
                message = await call.read()
                for delta in message.choices:
                    ids += delta.token_ids
                    text += delta.text
            call.cancel()
            again = await r.stream(text_request(stopping=stopping, continue_from=[pb.ContinuedChoice(token_ids=ids)]))
            assert ids + again.ids.get(0, []) == whole.ids[0]
            assert text + again.text.get(0, "") == whole.text[0]
        await r.core.until(lambda: not r.core.runs)


@run_async
async def test_continuation_with_finished_and_ended_choices() -> None:
    async with rig() as r:
        request = text_request(
            sampling=pb.Sampling(temperature=0.0, n=3),
            stopping=pb.Stopping(max_tokens=6),
            continue_from=[
                pb.ContinuedChoice(index=0, token_ids=ANSWER_IDS[:6], finished=True),
                pb.ContinuedChoice(index=1, token_ids=ANSWER_IDS[1:7]),
                pb.ContinuedChoice(index=2, token_ids=ANSWER_IDS[2:4]),
            ],
        )
        answer = await r.stream(request)
        assert set(answer.finish) == {1, 2}
        assert answer.ids == {1: [], 2: ANSWER_IDS[4:8]}
        assert answer.usage.completion_tokens == 18
        (submit,) = r.core.got(front.Submit)
        assert [choice.index for choice in submit.choices] == [2]
        nothing = await r.stream(
            text_request(
                stopping=pb.Stopping(max_tokens=6),
                continue_from=[pb.ContinuedChoice(token_ids=ANSWER_IDS[:6], finished=True)],
            )
        )
        assert nothing.usage.completion_tokens == 6
        assert not nothing.finish


@run_async
async def test_list_models() -> None:
    async with rig() as r:
        (model,) = (await r.stub.ListModels(pb.ListModelsRequest())).models
        assert model.name == "m"
        assert model.defaults == pb.SamplingDefaults(
            temperature=0.25, top_k=7, top_p=0.5, min_p=0.0, repetition_penalty=1.0
        )
        assert model.accepts_text
        assert model.accepts_chat
        assert list(model.eos_token_ids) == [EOS]
        assert model.executors_ready == 1


@run_async
async def test_model_without_a_tokenizer_serves_ids_alone() -> None:
    async with rig(ready=False) as r:
        files = {"generation_config.json": FILES["generation_config.json"]}
        r.core.files |= files
        await r.core.until(lambda: r.core.got(front.Attach))
        await r.ready()
        await r.announce(model_state("bare", files))
        request = pb.GenerateRequest(model="bare", token_ids=pb.TokenIds(ids=[1]), stopping=pb.Stopping(max_tokens=3))
        answer = await r.stream(request)
        assert answer.ids[0] == ANSWER_IDS[:3]
        assert answer.text[0] == ""
        for bad in (
            pb.GenerateRequest(model="bare", text="hello"),
            pb.GenerateRequest(model="bare", token_ids=pb.TokenIds(ids=[1]), stopping=pb.Stopping(stop=["x"])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await r.stream(bad)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "tokenizer" in caught.value.details()


@run_async
async def test_giant_texts_hold_up_no_page() -> None:
    """More giants than there are threads; a text of a page is encoded long before the first of them is."""
    async with rig() as r:
        await r.announce(model_state("m", context_length=65536))
        giant = pb.TokenizeRequest(text="The lazy dog jumps. " * 70_000)
        giants = [asyncio.ensure_future(r.stub.Tokenize(giant)) for _ in range(3)]
        await until(lambda: r.server.service.open_calls == 3)
        page = await r.stub.Tokenize(pb.TokenizeRequest(text="The lazy dog jumps. " * 150))
        assert len(page.ids) > 150
        assert not any(call.done() for call in giants)
        for call in giants:
            call.cancel()
        await asyncio.gather(*giants, return_exceptions=True)
        await until(lambda: r.server.service.open_calls == 0)
