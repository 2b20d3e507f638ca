"""The asyncio client: the same names and meanings as ``stepwire.client``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from stepwire.channels import Options, channel_options, split_addresses
from stepwire.credentials import bearer
from stepwire.errors import RequestError
from stepwire.generation import Generation, Progress
from stepwire.request import Prompt, build, detokenize_request, tokenize_request
from stepwire.types import Chunk, Completion, Model


class AsyncClient:
    """See ``stepwire.client.Client``. Belongs to the event loop it is made in."""

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        api_key: str = "",
        retry_for: float = 60.0,
        on_break: Callable[[RequestError], None] | None = None,
        options: Options = (),
    ) -> None:
        arguments = channel_options(options)
        self._metadata = (*metadata, *(bearer(api_key) if api_key else ()))
        self._retry_for = retry_for
        self._on_break = on_break
        self._channels = [
            grpc.aio.insecure_channel(target, arguments)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, arguments)
            for target in split_addresses(address)
        ]
        self._stubs = [pb_grpc.InferenceStub(channel) for channel in self._channels]
        self._turn = itertools.count()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **parameters: Any) -> AsyncStream:
        """Generate; iterate over the result for its chunks. `parameters`: those of ``stepwire.request.build``."""
        generation = Generation(
            build(prompt, **parameters),
            timeout=timeout,
            retry_for=self._retry_for,
            addresses=len(self._stubs),
            on_break=self._on_break,
        )
        return AsyncStream(self, generation)

    # `timeout` becomes the gRPC deadline, which the server sees and acts on: asyncio.timeout would not tell it.
    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **parameters: Any,
    ) -> Completion:
        """Generate and wait for the whole answer."""
        async with self.stream(prompt, timeout=timeout, **parameters) as stream:
            return await stream.result()

    async def models(self, *, timeout: float | None = 30.0) -> list[Model]:  # noqa: ASYNC109
        """The models of the first server in turn that answers."""
        response = await self._unary("ListModels", pb.ListModelsRequest(), timeout)
        return [Model.of(model) for model in response.models]

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        model: str = "",
        bos: bool = True,
        timeout: float | None = 30.0,  # noqa: ASYNC109
    ) -> list[int]:
        """The ids that a text or a chat has as a prompt."""
        return list((await self._unary("Tokenize", tokenize_request(prompt, model, bos), timeout)).ids)

    async def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout: float | None = 30.0,  # noqa: ASYNC109
    ) -> str:
        """The text of ids."""
        request = detokenize_request(ids, model, skip_special_tokens)
        text: str = (await self._unary("Detokenize", request, timeout)).text
        return text

    async def _unary(self, method: str, request: Any, timeout: float | None) -> Any:  # noqa: ASYNC109
        """The answer of the first server in turn that is there."""
        for left in reversed(range(len(self._stubs))):
            try:
                return await getattr(self._stub(), method)(request, timeout=timeout, metadata=self._metadata)
            except grpc.RpcError as error:
                if left and error.code() == grpc.StatusCode.UNAVAILABLE:
                    continue
                raise RequestError.of(error) from None
        raise AssertionError("no address")  # split_addresses refuses this

    def _stub(self) -> pb_grpc.InferenceStub:
        return self._stubs[next(self._turn) % len(self._stubs)]

    def _call(self, generation: Generation) -> grpc.aio.UnaryStreamCall:
        return self._stub().GenerateStream(
            generation.request(), timeout=generation.remaining(), metadata=self._metadata
        )

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream(Progress):
    """See ``stepwire.client.Stream``."""

    def __init__(self, client: AsyncClient, generation: Generation) -> None:
        self._client = client
        self._generation = generation
        self._call: grpc.aio.UnaryStreamCall | None = None
        self._cancelled = asyncio.Event()
        self._chunks = self._run()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def result(self) -> Completion:
        """Read to the end; everything received, as one value."""
        async for _ in self._chunks:
            pass
        return self._generation.completion()

    async def _run(self) -> AsyncIterator[Chunk]:
        generation = self._generation
        while not self._cancelled.is_set():
            self._call = call = self._client._call(generation)
            try:
                async for message in call:
                    for chunk in generation.feed(message):
                        yield chunk
                if not generation.broke_off():
                    return
                code, details, trailers = grpc.StatusCode.UNAVAILABLE, "the stream ended before its last message", ()
            except grpc.RpcError as error:
                if self._cancelled.is_set():
                    return
                code, details = error.code(), error.details() or "no details given"
                trailers = tuple(error.trailing_metadata() or ())
            except asyncio.CancelledError:
                # Our own close() surfaces here as well; a cancelled task goes on being cancelled.
                if self._cancelled.is_set() and not _task_cancelled():
                    return
                raise
            finally:
                call.cancel()
            delay = generation.retry_after(code, details, trailers)
            if delay < 0 or await self._pause(delay):
                return

    async def _pause(self, seconds: float) -> bool:
        """Wait; True when close() was called meanwhile."""
        try:
            await asyncio.wait_for(self._cancelled.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Cancel the request; the iteration ends."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
