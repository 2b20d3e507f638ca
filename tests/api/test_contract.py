"""The whole request through the worker: every parameter reaches the core, every answer reaches the client."""

from __future__ import annotations

import math
import struct

import grpc
import msgspec
import numpy as np
import pytest
from google.rpc import error_details_pb2

from protos import front
from protos.step import RowLogprobs
from protos.stepwire.v1 import inference_pb2 as pb
from protos.wire import pack_int32, unpack_int32
from scheduler_svc.prefix_hash import block_hashes
from tests.api.fake_core import EOS, FILES, model_state
from tests.api.rig import ANSWER_IDS, Rig, decoded, rig, run_async, text_request
from tests.api.test_door import details_of, ids_request, refusal_of, sampling, stopping
from tests.api.vocabularies import byte_level

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def output(**kwargs: object) -> pb.GenerateRequest:
    return ids_request(output=pb.Output(**kwargs))  # type: ignore[arg-type]


REFUSED: list[tuple[pb.GenerateRequest, str, str]] = [
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", "0.001 to 1000"),
    (sampling(repetition_penalty=1e-45), "sampling.repetition_penalty", "0.001 to 1000"),
    (sampling(repetition_penalty=1001.0), "sampling.repetition_penalty", "1000"),
    (sampling(repetition_penalty=math.nan), "sampling.repetition_penalty", "nan"),
    (sampling(frequency_penalty=100.5), "sampling.frequency_penalty", "-100 to 100"),
    (sampling(frequency_penalty=math.inf), "sampling.frequency_penalty", "inf"),
    (sampling(presence_penalty=-101.0), "sampling.presence_penalty", "-101"),
    (sampling(logit_bias={3: math.nan}), "sampling.logit_bias[3]", "nan"),
    (sampling(logit_bias={3: math.inf}), "sampling.logit_bias[3]", "inf"),
    (sampling(logit_bias={3: 100.5}), "sampling.logit_bias[3]", "-100 to 100, or -infinity"),
    (sampling(logit_bias={401: 1.0}), "sampling.logit_bias[401]", "401"),
    (sampling(logit_bias=dict.fromkeys(range(4097), 1.0)), "sampling.logit_bias", "4097"),
    (sampling(logit_bias=dict.fromkeys(range(401), -math.inf)), "sampling.logit_bias", "401 ids banned"),
    (sampling(allowed_token_ids=[401]), "sampling.allowed_token_ids[0]", "401"),
    (sampling(allowed_token_ids=[1, 1]), "sampling.allowed_token_ids", "twice"),
    (sampling(allowed_token_ids=[5], logit_bias={5: -math.inf}), "sampling.logit_bias", "left to draw"),
    (stopping(min_tokens=9, max_tokens=8), "stopping.min_tokens", "8"),
    (stopping(min_tokens=256), "stopping.min_tokens", "255"),
    (
        ids_request(sampling=pb.Sampling(allowed_token_ids=[EOS]), stopping=pb.Stopping(min_tokens=1)),
        "stopping.min_tokens",
        "only ids that end",
    ),
    (output(logprobs=21), "output.logprobs", "0 to 20"),
    (output(prompt_logprobs=21), "output.prompt_logprobs", "0 to 20"),
    (ids_request(tenant="t" * 129), "tenant", "128"),
]


@run_async
async def test_bad_parameters() -> None:
    async with rig() as r:
        for request, field, words in REFUSED:
            error = await refusal_of(r.stub, request)
            assert error.code() == INVALID, (field, error)
            assert words in error.details(), (field, error.details())
            (bad,) = details_of(error, error_details_pb2.BadRequest)
            assert bad.field_violations[0].field == field
            (info,) = details_of(error, error_details_pb2.ErrorInfo)
            assert (info.domain, info.reason, info.metadata["field"]) == ("stepwire", "INVALID_ARGUMENT", field)
            assert info.metadata["limit"]
            assert info.metadata["value"]
        assert not r.core.got(front.Submit)


@run_async
async def test_every_parameter_reaches_the_core() -> None:
    async with rig() as r:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=list(range(10, 43))),
            tenant="acme",
            priority=7,
            sampling=pb.Sampling(
                repetition_penalty=1.5, frequency_penalty=-2.0, presence_penalty=0.5,
                logit_bias={9: -math.inf, 3: 2.5}, allowed_token_ids=[EOS, 60, 50, 9],
            ),
            stopping=pb.Stopping(max_tokens=3, min_tokens=2, stop_token_ids=[60]),
            output=pb.Output(prompt_token_ids=True),
        )  # fmt: skip
        answer = await r.stream(request)
        (submit,) = r.core.got(front.Submit)
        s = submit.sampling
        assert (s.repetition_penalty, s.frequency_penalty, s.presence_penalty) == (1.5, -2.0, 0.5)
        assert unpack_int32(s.logit_bias_ids).tolist() == [3, 9]
        assert struct.unpack("<2f", s.logit_bias) == (2.5, -math.inf)
        assert unpack_int32(s.allowed_ids).tolist() == [EOS, 9, 50, 60]
        assert s.min_tokens == 2
        assert unpack_int32(s.masked_until_min_tokens).tolist() == [EOS, 60]
        assert (s.logprobs, s.prompt_logprobs) == (-1, -1)
        assert (submit.tenant, submit.priority, submit.bypass_cache) == ("acme", 7, False)
        tokens = np.arange(10, 43, dtype=np.int32)
        assert submit.block_hashes == block_hashes("f" * 64, "acme", tokens, 16)
        assert answer.started is not None
        assert list(answer.started.prompt_token_ids) == list(range(10, 43))
        await r.stream(ids_request(bypass_prefix_cache=True, stopping=pb.Stopping(max_tokens=1, ignore_eos=True)))
        submit = r.core.got(front.Submit)[-1]
        assert submit.bypass_cache
        assert not submit.block_hashes


@run_async
async def test_generation_defaults_of_the_model() -> None:
    files = FILES | {"generation_config.json": b'{"repetition_penalty": 1.25}'}
    async with rig(ready=False) as r:
        r.core.files = files
        r.core.models = (model_state(files=files),)
        await r.ready()
        await r.stream(ids_request(stopping=pb.Stopping(max_tokens=1)))
        assert r.core.got(front.Submit)[0].sampling.repetition_penalty == 1.25


@run_async
async def test_a_model_without_text_refuses_what_needs_it() -> None:
    files = {"generation_config.json": b"{}"}
    async with rig(ready=False) as r:
        r.core.files = files
        r.core.models = (model_state(files=files),)
        await r.ready()
        for request in (
            pb.GenerateRequest(text="x"),
            stopping(stop=["x"]),
            stopping(include_stop=True),
            output(skip_special_tokens=False),
        ):
            error = await refusal_of(r.stub, request)
            assert error.code() == INVALID
            assert "tokenizer" in error.details()
        for call in (
            r.stub.Tokenize(pb.TokenizeRequest(text="x")),
            r.stub.Detokenize(pb.DetokenizeRequest(ids=[1])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == INVALID
        answer = await r.stream(ids_request(stopping=pb.Stopping(max_tokens=3), sampling=pb.Sampling(temperature=0)))
        assert (answer.ids[0], answer.text[0]) == (ANSWER_IDS[:3], "")


@run_async
async def test_tokenize_and_detokenize() -> None:
    async with rig() as r:
        text = "caf\u00e9 \U0001f600 <|im_end|> fox"
        ids = byte_level().encode(text, add_special_tokens=False).ids
        answer = await r.stub.Tokenize(pb.TokenizeRequest(text=text, pieces=True))
        assert (answer.model, list(answer.ids)) == ("m", ids)
        assert b"".join(answer.pieces).decode() == text
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        expected = byte_level().encode(rendered, add_special_tokens=False).ids
        assert list((await r.stub.Tokenize(pb.TokenizeRequest(chat=chat))).ids) == expected
        plain = await r.stub.Detokenize(pb.DetokenizeRequest(ids=ids))
        assert plain.text == decoded(ids)
        spelled = await r.stub.Detokenize(pb.DetokenizeRequest(ids=ids, skip_special_tokens=False))
        assert spelled.text == text
        for call in (
            r.stub.Tokenize(pb.TokenizeRequest()),
            r.stub.Tokenize(pb.TokenizeRequest(chat=chat, no_bos=True)),
            r.stub.Tokenize(pb.TokenizeRequest(text="x" * 200_000)),
            r.stub.Detokenize(pb.DetokenizeRequest(ids=[401])),
            r.stub.Detokenize(pb.DetokenizeRequest(ids=[1] * 257)),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == INVALID, caught.value


@run_async
async def test_include_stop_special_tokens_and_min_tokens() -> None:
    def script(choice: int, position: int) -> int:
        return EOS if position == 20 else ANSWER_IDS[position]

    async with rig(tokens=script) as r:
        whole = decoded(ANSWER_IDS[:20])
        stop = whole[6:9]
        kept = await r.stream(text_request(stopping=pb.Stopping(max_tokens=30, stop=[stop], include_stop=True)))
        assert kept.text[0] == whole[: whole.index(stop)] + stop
        assert kept.finish[0].stop == stop
        request = text_request(stopping=pb.Stopping(max_tokens=30, include_stop=True))
        request.output.skip_special_tokens = False
        ended = await r.stream(request)
        assert ended.text[0] == whole + "<|im_end|>"
        assert ended.finish[0].eos_token_id == EOS
        request.stopping.include_stop = False
        assert (await r.stream(request)).text[0] == whole
        late = await r.stream(text_request(stopping=pb.Stopping(max_tokens=30, stop=[stop], min_tokens=20)))
        assert late.text[0] == whole
        assert late.finish[0].eos_token_id == EOS


def rows_of(first: int, ids: list[int], top: int) -> bytes:
    """Log probabilities made of position and id, for the positions from ``first`` on."""
    rows = tuple(
        RowLogprobs(
            position, -token / 1024, 1 + position, pack_int32([token + i for i in range(top)]),
            np.arange(top, dtype="<f4").tobytes(),
        )
        for position, token in enumerate(ids, first)
    )  # fmt: skip
    return msgspec.msgpack.encode(rows)


async def start_logprobs(r: Rig, request: pb.GenerateRequest) -> tuple[grpc.aio.UnaryStreamCall, int]:
    r.core.auto = False
    call = r.stub.GenerateStream(request)
    await call.read()
    return call, next(iter(r.core.runs))[0]


@run_async
async def test_logprobs_come_once_in_order_and_agree_with_the_cut() -> None:
    prompt = list(range(20, 30))
    async with rig() as r:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.Sampling(temperature=0),
            stopping=pb.Stopping(max_tokens=4),
            output=pb.Output(logprobs=2, prompt_logprobs=1),
        )
        call, number = await start_logprobs(r, request)
        ids = ANSWER_IDS[:4]
        # Prompt positions in two parts, the second one twice (as after a preemption); an output past the end.
        await r.core.send(front.Tokens(b"", b"", logprobs=((number, 0, rows_of(1, prompt[1:6], 1)),)))
        await r.core.send(front.Tokens(b"", b"", logprobs=((number, 0, rows_of(1, prompt[1:], 1)),)))
        extra = rows_of(10, [*ids, 7], 2)
        await r.core.send(
            front.Tokens(pack_int32([number]), pack_int32(ids), b"\0", b"\4", logprobs=((number, 0, extra),))
        )
        r.core.runs.clear()
        await r.core.send(front.Finished(number, 0, front.LENGTH, 4, 0))
        prompt_rows: list[pb.TokenLogprob] = []
        rows: list[pb.TokenLogprob] = []
        got: list[int] = []
        while (message := await call.read()) is not grpc.aio.EOF:
            assert not (got and message.prompt_logprobs), "the prompt's come first"
            prompt_rows += message.prompt_logprobs
            for delta in message.choices:
                assert len(delta.token_ids) == len(delta.logprobs)
                got += delta.token_ids
                rows += delta.logprobs
        assert got == ids
        assert [row.token_id for row in prompt_rows] == prompt[1:]
        assert [row.rank for row in prompt_rows] == list(range(2, 11))
        assert [row.token_id for row in rows] == ids
        assert [row.rank for row in rows] == [11, 12, 13, 14]
        assert rows[0].logprob == pytest.approx(-ids[0] / 1024)
        assert [(top.token_id, top.logprob) for top in rows[1].top] == [(ids[1], 0.0), (ids[1] + 1, 1.0)]


@run_async
async def test_logprobs_that_are_missing_end_the_request_by_name() -> None:
    async with rig() as r:
        request = text_request()
        request.output.logprobs = 0
        call, number = await start_logprobs(r, request)
        await r.core.send(front.Tokens(pack_int32([number]), pack_int32([ANSWER_IDS[0]])))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert "log probability" in caught.value.details()
        await r.core.until(lambda: not r.core.runs)


@run_async
async def test_a_continuation_asks_for_no_prompt_logprobs_again() -> None:
    async with rig() as r:
        request = ids_request(
            sampling=pb.Sampling(temperature=0), stopping=pb.Stopping(max_tokens=3), output=pb.Output(prompt_logprobs=0)
        )
        request.continue_from.add(index=0, token_ids=ANSWER_IDS[:2])
        answer = await r.stream(request)
        assert answer.ids[0] == ANSWER_IDS[2:3]
        assert r.core.got(front.Submit)[0].sampling.prompt_logprobs == -1
