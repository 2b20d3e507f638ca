"""The blocking client."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from stepwire.channels import Options, channel_options, split_addresses
from stepwire.credentials import bearer
from stepwire.errors import RequestError
from stepwire.generation import Generation, Progress
from stepwire.request import Prompt, build, detokenize_request, tokenize_request
from stepwire.types import Chunk, Completion, Model

Metadata = Sequence[tuple[str, str]]


class Client:
    """A client of one or several scheduler services that serve the same models.

    `address`: ``host:port``, or several (a sequence, or separated by commas), taken in turn. `credentials`: for TLS
    (``stepwire.credentials.tls``); without, plain text. `metadata`: sent with every call; `api_key` as one of it.
    `retry_for`: seconds without a message after which a broken stream is given up. `on_break`: called with the reason
    when a stream can begin or go on at none of the addresses, before they are tried again. `options`: more gRPC channel
    arguments. Safe to use from several threads.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
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
            grpc.insecure_channel(target, arguments)
            if credentials is None
            else grpc.secure_channel(target, credentials, arguments)
            for target in split_addresses(address)
        ]
        self._stubs = [pb_grpc.InferenceStub(channel) for channel in self._channels]
        self._turn = itertools.count()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **parameters: Any) -> Stream:
        """Generate; iterate over the result for its chunks. `parameters`: those of ``stepwire.request.build``."""
        generation = Generation(
            build(prompt, **parameters),
            timeout=timeout,
            retry_for=self._retry_for,
            addresses=len(self._stubs),
            on_break=self._on_break,
        )
        return Stream(self, generation)

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **parameters: Any) -> Completion:
        """Generate and wait for the whole answer. A stream underneath, so a broken one is continued here, too."""
        with self.stream(prompt, timeout=timeout, **parameters) as stream:
            return stream.result()

    def models(self, *, timeout: float | None = 30.0) -> list[Model]:
        """The models of the first server in turn that answers."""
        response = self._unary("ListModels", pb.ListModelsRequest(), timeout)
        return [Model.of(model) for model in response.models]

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        model: str = "",
        bos: bool = True,
        timeout: float | None = 30.0,
    ) -> list[int]:
        """The ids that a text or a chat has as a prompt."""
        return list(self._unary("Tokenize", tokenize_request(prompt, model, bos), timeout).ids)

    def detokenize(
        self,
        ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout: float | None = 30.0,
    ) -> str:
        """The text of ids."""
        request = detokenize_request(ids, model, skip_special_tokens)
        text: str = self._unary("Detokenize", request, timeout).text
        return text

    def _unary(self, method: str, request: Any, timeout: float | None) -> Any:
        """The answer of the first server in turn that is there."""
        for left in reversed(range(len(self._stubs))):
            try:
                return getattr(self._stub(), method)(request, timeout=timeout, metadata=self._metadata)
            except grpc.RpcError as error:
                if left and error.code() == grpc.StatusCode.UNAVAILABLE:
                    continue
                raise RequestError.of(error) from None
        raise AssertionError("no address")  # split_addresses refuses this

    def _stub(self) -> pb_grpc.InferenceStub:
        return self._stubs[next(self._turn) % len(self._stubs)]

    def _call(self, generation: Generation) -> grpc.Call:
        return self._stub().GenerateStream(
            generation.request(), timeout=generation.remaining(), metadata=self._metadata
        )

    def _pause(self, seconds: float, cancelled: threading.Event) -> bool:
        """Wait; True when cancelled meanwhile. gRPC works on a connection only while a call waits on its channel (else
        every 5 s): small calls wait for the pause, so that a server that is back is found at once."""
        calls = [
            stub.ListModels.future(
                pb.ListModelsRequest(), timeout=seconds, metadata=self._metadata, wait_for_ready=True
            )
            for stub in (self._stubs if seconds > 0 else ())
        ]
        try:
            return cancelled.wait(seconds)
        finally:
            for call in calls:
                call.cancel()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream(Progress):
    """The chunks of one request. ``started`` and ``usage`` are known from the first and the last chunk on."""

    def __init__(self, client: Client, generation: Generation) -> None:
        self._client = client
        self._generation = generation
        self._call: grpc.Call | None = None
        self._cancelled = threading.Event()
        self._chunks = self._run()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def result(self) -> Completion:
        """Read to the end; everything received, as one value."""
        for _ in self._chunks:
            pass
        return self._generation.completion()

    def _run(self) -> Iterator[Chunk]:
        generation = self._generation
        while not self._cancelled.is_set():
            self._call = call = self._client._call(generation)
            try:
                for message in call:
                    yield from generation.feed(message)
                if not generation.broke_off():
                    return
                code, details, trailers = grpc.StatusCode.UNAVAILABLE, "the stream ended before its last message", ()
            except grpc.RpcError as error:
                if self._cancelled.is_set():
                    return
                code, details = error.code(), error.details() or "no details given"
                trailers = error.trailing_metadata() or ()
            finally:
                call.cancel()
            delay = generation.retry_after(code, details, trailers)
            if delay < 0 or self._client._pause(delay, self._cancelled):
                return

    def close(self) -> None:
        """Cancel the request (safe from another thread); the iteration ends."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
