"""A worker, a fake core and a client, on loopback; everything is gone when the block ends."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import grpc
import zmq.asyncio

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from scheduler_svc.api.core_link import LinkConfig
from scheduler_svc.api.server import ApiServer, ServerConfig
from tests.api.fake_core import FakeCore
from tests.api.vocabularies import byte_level

ANSWER = "The caf\u00e9 said \u4f60\u597d \U0001f600, the lazy dog jumps over STOP here. " * 4
ANSWER_IDS: list[int] = byte_level().encode(ANSWER, add_special_tokens=False).ids


def answer_token(choice: int, position: int) -> int:
    """Choice c begins c tokens later in the answer."""
    return ANSWER_IDS[(choice + position) % len(ANSWER_IDS)]


def decoded(ids: list[int]) -> str:
    return byte_level().decode(ids, skip_special_tokens=True)


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def wrapper(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(100):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return wrapper


@dataclass
class Answer:
    """What a stream brought, and how it ended."""

    started: pb.Started | None = None
    messages: int = 0
    usage: pb.Usage | None = None
    ids: dict[int, list[int]] = None  # type: ignore[assignment]
    text: dict[int, str] = None  # type: ignore[assignment]
    finish: dict[int, pb.Finish] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.ids, self.text, self.finish = {}, {}, {}

    def add(self, message: pb.GenerateStreamResponse) -> None:
        assert (self.messages == 0) == message.HasField("started")
        assert self.usage is None
        self.messages += 1
        if message.HasField("started"):
            self.started = message.started
        if message.HasField("usage"):
            self.usage = message.usage
        for delta in message.choices:
            assert delta.index not in self.finish
            self.ids.setdefault(delta.index, []).extend(delta.token_ids)
            self.text[delta.index] = self.text.get(delta.index, "") + delta.text
            if delta.HasField("finish"):
                self.finish[delta.index] = delta.finish


@dataclass
class Rig:
    server: ApiServer
    core: FakeCore
    channel: grpc.aio.Channel
    stub: pb_grpc.InferenceStub
    address: str
    context: zmq.asyncio.Context

    async def restart_core(self, down: Callable[[], Coroutine[Any, Any, None]] | None = None) -> FakeCore:
        """The core is killed and another takes its place, with the same script."""
        old = self.core
        await old.die()
        if down is not None:
            await down()
        self.core = FakeCore(self.context, self.address, old.tokens)
        self.core.auto = old.auto
        self.core.models = old.models
        return self.core

    async def announce(self, *models: front.ModelState) -> None:
        """Until the worker has heard of it: the next request does not come before."""
        await self.core.announce(*models)
        await until(lambda: [model.state for model in self.server.models.announced()] == list(models))

    async def ready(self) -> None:
        """Until the model is served."""
        while not self.server.health.serving:
            await self.server.health._news.wait()

    async def stream(self, request: pb.GenerateRequest, **kwargs: Any) -> Answer:
        answer = Answer()
        async for message in self.stub.GenerateStream(request, **kwargs):
            answer.add(message)
        return answer


@asynccontextmanager
async def rig(
    tokens: Callable[[int, int], int] = answer_token, *, ready: bool = True, **changes: Any
) -> AsyncIterator[Rig]:
    """``changes``: of ServerConfig, and as ``link`` a dict of changes to its LinkConfig."""
    folder = tempfile.mkdtemp(prefix="sw-")
    address = f"ipc://{folder}/front"
    context = zmq.asyncio.Context()
    core = FakeCore(context, address, tokens)
    link = replace(LinkConfig(address, "w0", incarnation=7, pause=0.005), **changes.pop("link", {}))
    server = ApiServer(ServerConfig(link=link, listen="127.0.0.1:0", **changes))
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
    made = Rig(server, core, channel, pb_grpc.InferenceStub(channel), address, context)
    try:
        if ready:
            await made.ready()
        yield made
        async with asyncio.timeout(10):  # a call that was cancelled just now may still be on its way out
            await until(lambda: (server.service.open_calls == 0 or not ready) and not server.link.open)
    finally:
        await channel.close()
        await server.stop()
        await made.core.die()
        context.term()
        shutil.rmtree(folder, ignore_errors=True)


async def until(holds: Callable[[], bool]) -> None:
    """Looks again and again, while the others have their turns."""
    while not holds():  # noqa: ASYNC110 - what is looked at has no event
        await asyncio.sleep(0.005)


def text_request(text: str = "hello", **kwargs: Any) -> pb.GenerateRequest:
    """Greedy, 12 tokens, unless told otherwise."""
    kwargs.setdefault("sampling", pb.Sampling(temperature=0.0))
    kwargs.setdefault("stopping", pb.Stopping(max_tokens=12))
    return pb.GenerateRequest(text=text, **kwargs)
