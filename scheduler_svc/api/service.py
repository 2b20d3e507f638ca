"""stepwire.v1.Inference: its calls, as thin as they can be over Stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from protos import front
from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from scheduler_svc.api import door
from scheduler_svc.api.core_link import CoreLink
from scheduler_svc.api.logprobs import MissingLogprobs
from scheduler_svc.api.metrics import Metrics
from scheduler_svc.api.models import Model, ModelRegistry
from scheduler_svc.api.refusal import Refusal
from scheduler_svc.api.request import canonical, encode
from scheduler_svc.api.stream import Stream
from scheduler_svc.api.tenancy import Tenancy
from scheduler_svc.api.text.detokenizer import Detokenizer
from scheduler_svc.api.text.lanes import Lanes

log = logging.getLogger(__name__)

SERVICE_NAME = "stepwire.v1.Inference"


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    max_streams: int = 8192  # open at once in this worker; beyond: RESOURCE_EXHAUSTED
    startup_grace: float = 4.0  # seconds after the start in which a model that is not known yet may come
    model_patience: float = 15.0  # seconds that a request waits for a first model, or for a model's files
    slow_seconds: float = 60.0  # a client that reads nothing for so long, with more than ...
    slow_tokens: int = 1024  # ... so many tokens waiting for it, or with all of its answer there, is given up


class ClientGone(Exception):
    """A write failed. grpc.aio says so with exceptions of its own, not with CancelledError."""


class InferenceService(pb_grpc.InferenceServicer):
    def __init__(
        self, link: CoreLink, models: ModelRegistry, metrics: Metrics, config: ServiceConfig, tenancy: Tenancy
    ) -> None:
        self._link = link
        self._models = models
        self._metrics = metrics
        self._config = config
        self._tenancy = tenancy
        self._lanes = Lanes()
        self.open_calls = 0

    def close(self) -> None:
        self._lanes.close()

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        response = pb.ListModelsResponse()
        async with self._call("ListModels", context) as call:
            self._tenancy.of(context.invocation_metadata())
            response.models.extend(_describe(model) for model in self._models.announced())
        await call.abort_if_refused(context)
        return response

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        response = pb.TokenizeResponse()
        async with self._call("Tokenize", context) as call:
            self._tenancy.of(context.invocation_metadata())
            door.check_tokenize(request)
            model = await self._models.resolve(request.model, self._config.model_patience)
            door.check_text(request.WhichOneof("prompt") or "", model)
            ids = await encode(request, model, self._lanes, bos=not request.no_bos)
            response.model = model.name
            pieces = model.tokenizer.pieces if request.pieces and model.tokenizer is not None else None
            async for part in self._lanes.turns(len(ids)):
                some = ids[part].tolist()
                response.ids.extend(some)
                if pieces is not None:
                    response.pieces.extend([pieces[token].data for token in some])
        await call.abort_if_refused(context)
        return response

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        response = pb.DetokenizeResponse()
        async with self._call("Detokenize", context) as call:
            self._tenancy.of(context.invocation_metadata())
            model = await self._models.resolve(request.model, self._config.model_patience)
            door.check_detokenize(request, model)
            assert model.tokenizer is not None
            keep_special = request.HasField("skip_special_tokens") and not request.skip_special_tokens
            detokenizer = Detokenizer(model.tokenizer.pieces, keep_special=keep_special)
            text = []
            async for part in self._lanes.turns(len(request.ids)):
                some = request.ids[part]
                door.check_ids("ids", some, model.state.vocab_size, part.start)
                text.append(detokenizer.push(some))
            response.model = model.name
            response.text = "".join(text) + detokenizer.flush()
        await call.abort_if_refused(context)
        return response

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        async with self._call("Generate", context) as call, self._stream(request, context, call, False) as stream:
            response = await stream.whole(self._lanes)
            self._count_end(stream)
        await call.abort_if_refused(context)
        return response

    async def GenerateStream(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._call("GenerateStream", context) as call, self._stream(request, context, call, True) as stream:
            while (message := await stream.next()) is not None:
                call.observe(stream, message)
                stream.writing_since = time.monotonic()
                self._link.writing += 1
                try:
                    await context.write(message)
                except Exception as error:
                    raise ClientGone(repr(error)) from error
                finally:
                    stream.writing_since = 0.0
                    self._link.writing -= 1
            self._count_end(stream)
        await call.abort_if_refused(context)

    def sweep(self) -> None:
        """Gives up streams whose client does not read; to be called about once a second."""
        now = time.monotonic()
        for stream in list(self._link.open):
            since = stream.writing_since
            held = stream.ended or stream.unread > self._config.slow_tokens
            if since and now - since > self._config.slow_seconds and held:
                stream.evicted = True
                if stream.task is not None:
                    stream.task.cancel()  # the write would wait for the client for ever

    @asynccontextmanager
    async def _stream(
        self, proto: pb.GenerateRequest, context: grpc.aio.ServicerContext, call: _Call, streaming: bool
    ) -> AsyncIterator[Stream]:
        """An accepted stream; whatever happens, it is closed in the core too, before the client is told anything."""
        arrival = time.time()
        tenant = self._tenancy.of(context.invocation_metadata(), proto.tenant)
        door.check_form(proto)
        if len(self._link.open) >= self._config.max_streams:
            raise Refusal(front.RESOURCE_EXHAUSTED, f"{self._config.max_streams} streams are open here already")
        remaining = context.time_remaining()
        model = await self._models.resolve(proto.model, self._config.model_patience)
        request = await canonical(
            proto,
            model,
            tenant=tenant,
            arrival=arrival,
            deadline=arrival + remaining if remaining is not None else 0.0,
            lanes=self._lanes,
        )
        stream = Stream(request, streaming=streaming)
        await stream.resume(self._lanes)
        stream.task = asyncio.current_task()
        call.stream = stream
        if not stream.ended:
            self._link.add(stream)
        try:
            await stream.wait_accepted()
            self._metrics.accepted_after.observe(time.monotonic() - call.began)
            self._metrics.prompt_tokens.inc(request.prompt_tokens)
            yield stream
        finally:
            self._link.remove(stream)
            self._metrics.output_tokens.inc(stream.new_tokens)

    @asynccontextmanager
    async def _call(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[_Call]:
        """Turns what ends a call into a refusal to be sent (``call.refusal``), and counts it."""
        call = _Call(self._metrics)
        self.open_calls += 1
        status = "OK"
        try:
            yield call
        except Refusal as refusal:
            call.refusal = refusal
        except MissingLogprobs as error:
            log.exception("log probabilities missing", extra={"method": method})
            call.refusal = Refusal(front.INTERNAL, str(error))
        except ClientGone:
            status = "CANCELLED"
        except asyncio.CancelledError:
            if call.stream is None or not call.stream.evicted:
                remaining = context.time_remaining()
                status = "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            self._metrics.slow_readers.inc()
            call.refusal = Refusal(
                front.RESOURCE_EXHAUSTED,
                f"nothing was read for {self._config.slow_seconds:g} s, and {call.stream.unread} tokens wait",
            )
        except Exception:
            log.exception("call failed", extra={"method": method})
            call.refusal = Refusal(front.INTERNAL, "internal error")
        finally:
            self.open_calls -= 1
            if call.refusal is not None:
                status = call.refusal.status.name
            self._metrics.requests.labels(method, status).inc()

    def _count_end(self, stream: Stream) -> None:
        self._metrics.cached_tokens.inc(stream.usage().cached_tokens)


class _Call:
    """One call on its way: what it will end with, and the times of its tokens."""

    __slots__ = ("_last", "_metrics", "began", "refusal", "stream")

    def __init__(self, metrics: Metrics) -> None:
        self.began = time.monotonic()
        self.refusal: Refusal | None = None
        self.stream: Stream | None = None
        self._last = 0.0
        self._metrics = metrics

    async def abort_if_refused(self, context: grpc.aio.ServicerContext) -> None:
        if self.refusal is not None:
            await context.abort(self.refusal.status, self.refusal.message, self.refusal.trailers())

    def observe(self, stream: Stream, message: pb.GenerateStreamResponse) -> None:
        tokens = max((len(delta.token_ids) for delta in message.choices), default=0)
        if not tokens:
            return
        now = time.monotonic()
        if self._last:
            self._metrics.inter_token.observe((now - self._last) / tokens)
        else:
            self._metrics.first_token.observe(now - self.began)
            log.debug("first token", extra=stream.first_token_times() | {"began": self.began})
        self._last = now


def _describe(model: Model) -> pb.Model:
    state, defaults = model.state, model.defaults
    return pb.Model(
        name=state.name,
        architecture=state.architecture,
        fingerprint=state.fingerprint,
        context_length=state.context_length,
        vocab_size=state.vocab_size,
        max_sequence_tokens=state.max_sequence_tokens,
        eos_token_ids=state.eos_token_ids,
        defaults=pb.SamplingDefaults(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ),
        accepts_text=model.tokenizer is not None,
        accepts_chat=model.template is not None,
        executors_ready=state.executors_ready,
        executors_expected=state.executors_expected,
    )
