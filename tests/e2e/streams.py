"""Requests through the public door, without any retry: what a test compares."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc

GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 60, "min_p": 0.01}
CALL_TIMEOUT = 120.0


@dataclass(slots=True)
class Answer:
    """All of one choice. ``seams[i]`` is (ids, characters of text) received up to the i-th message."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    seams: list[tuple[int, int]] = field(default_factory=list)
    reason: int = 0
    finish: pb.Finish | None = None
    ends: int = 0
    usage: pb.Usage | None = None
    started: pb.Started | None = None

    def feed(self, message: pb.GenerateStreamResponse, choice: int = 0) -> None:
        assert self.usage is None, "a message after the last one"
        if message.HasField("started"):
            assert self.started is None, "started twice"
            self.started = message.started
        assert self.started is not None, "the first message does not carry `started`"
        for delta in message.choices:
            if delta.index == choice:
                assert not self.ends, f"a delta after the end of choice {choice}: {delta}"
                self.ids += delta.token_ids
                self.text += delta.text
                self.seams.append((len(self.ids), len(self.text)))
                if delta.HasField("finish"):
                    self.ends += 1
                    self.finish, self.reason = delta.finish, delta.finish.reason
        if message.HasField("usage"):
            self.usage = message.usage

    def check_end(self) -> Answer:
        assert self.ends == 1, f"{self.ends} ends"
        assert self.usage is not None, "no usage"
        return self


def request(prompt: str | list[int], max_tokens: int = 32, model: str = "", **options: Any) -> pb.GenerateRequest:
    """``options``: fields of Sampling and Stopping, ``request_id``, ``continue_from`` (ids of choice 0)."""
    sampling = {k: options.pop(k) for k in ("temperature", "top_k", "top_p", "min_p", "seed", "n") if k in options}
    ids = options.pop("continue_from", None)
    out = pb.GenerateRequest(
        model=model,
        request_id=options.pop("request_id", ""),
        priority=options.pop("priority", 0),
        sampling=pb.Sampling(**sampling),
        stopping=pb.Stopping(max_tokens=max_tokens, ignore_eos=options.pop("ignore_eos", True), **options),
    )
    if isinstance(prompt, str):
        out.text = prompt
    else:
        out.token_ids.ids.extend(prompt)
    if ids is not None:
        out.continue_from.add(index=0, token_ids=ids)
    return out


def continuation(of: pb.GenerateRequest, answer: Answer, k: int) -> pb.GenerateRequest:
    """``of``, to go on from the first k ids of ``answer``."""
    out = pb.GenerateRequest()
    out.CopyFrom(of)
    assert answer.started is not None
    out.sampling.seed = answer.started.seed
    out.continue_from.add(index=0, token_ids=answer.ids[:k])
    return out


Watch = Callable[[int, Answer], None]  # (index of the request, what it has so far), after each message


async def stream(
    stub: pb_grpc.InferenceStub, message: pb.GenerateRequest, deadline: float = CALL_TIMEOUT
) -> AsyncIterator[Answer]:
    """The growing answer, after each message."""
    answer = Answer()
    async for part in stub.GenerateStream(message, timeout=deadline):
        answer.feed(part)
        yield answer
    answer.check_end()


def generate(
    address: str, messages: Iterable[pb.GenerateRequest], watch: Watch | None = None, timeout: float = CALL_TIMEOUT
) -> list[Answer]:
    """All at once, each to its end; raises the first failure. ``watch`` is called after every message."""

    async def one(stub: pb_grpc.InferenceStub, index: int, message: pb.GenerateRequest) -> Answer:
        answer = Answer()
        async for answer in stream(stub, message, timeout):
            if watch is not None:
                watch(index, answer)
        return answer

    async def everything() -> list[Answer]:
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = pb_grpc.InferenceStub(channel)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(stub, i, message)) for i, message in enumerate(messages)]
            return [task.result() for task in tasks]

    return asyncio.run(everything())


def one(address: str, message: pb.GenerateRequest, timeout: float = CALL_TIMEOUT) -> Answer:
    """A single request, nothing else from here in flight."""
    return generate(address, [message], timeout=timeout)[0]


def random_prompt(tokens: int, seed: int, vocab_size: int = 384) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(tokens)]


def common_requests(output_tokens: int = 40) -> list[pb.GenerateRequest]:
    """What every configuration must answer alike: prompts around block and chunk boundaries, greedy and seeded; two
    share a prefix of several blocks."""
    prompts = [random_prompt(length, seed=length) for length in (1, 7, 16, 33, 64, 130)]
    shared = random_prompt(80, seed=999)
    prompts += [shared + random_prompt(9, seed=1), shared + random_prompt(20, seed=2)]
    out = []
    for i, prompt in enumerate(prompts):
        out.append(request(prompt, output_tokens, **GREEDY))
        out.append(request(prompt, output_tokens, seed=1000 + i, **SEEDED))
    return out


def ids(answers: Iterable[Answer]) -> list[list[int]]:
    return [answer.ids for answer in answers]
