"""A scheduler service in one thread: deterministic tokens, and a script that says how each call breaks off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from types import TracebackType

import grpc

from protos.stepwire.v1 import inference_pb2 as pb
from protos.stepwire.v1 import inference_pb2_grpc as pb_grpc
from tests.ports import free_port


def token(seed: int, choice: int, position: int) -> int:
    return (seed * 31 + choice * 1009 + position * 7) % 32000


def piece(token_id: int) -> str:
    return "<\u00e9>" if token_id == 233 else f"<{token_id}>"


def expected_ids(seed: int, choice: int, count: int) -> tuple[int, ...]:
    return tuple(token(seed, choice, position) for position in range(count))


def expected_text(seed: int, choice: int, count: int) -> str:
    return "".join(map(piece, expected_ids(seed, choice, count)))


def dead_address() -> str:
    """One where nobody serves, and nobody will."""
    return f"127.0.0.1:{free_port()}"


@dataclass
class Break:
    """How one call ends early: after this many messages, with this status ("" ends OK without the last message)."""

    after: int
    code: grpc.StatusCode | None = grpc.StatusCode.UNAVAILABLE
    pushback_ms: str | None = None


@dataclass
class FakeServer(pb_grpc.InferenceServicer):
    """`script`: one entry a call, in order; None, or an exhausted script, lets the call run to its end."""

    script: list[Break | None] = field(default_factory=list)
    tokens_per_message: int = 1
    hold: bool = False  # after the first message, wait until the call is cancelled

    def __post_init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.deadlines: list[float] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.cancelled = threading.Event()
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        pb_grpc.add_InferenceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def GenerateStream(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        call = len(self.requests)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())
        if self.hold and not context.add_callback(self.cancelled.set):
            self.cancelled.set()  # ended already
        breaks = self.script[call] if call < len(self.script) else None
        for sent, message in enumerate(self._messages(request)):
            if breaks is not None and sent == breaks.after:
                if breaks.code is None:
                    return
                if breaks.pushback_ms is not None:
                    context.set_trailing_metadata((("grpc-retry-pushback-ms", breaks.pushback_ms),))
                context.abort(breaks.code, "as the script says")
            yield message
            if self.hold:
                self.cancelled.wait(30)
                return

    def _messages(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateStreamResponse]:
        seed = request.sampling.seed if request.sampling.HasField("seed") else 77
        n = request.sampling.n or 1
        limit = request.stopping.max_tokens
        done = {choice.index: len(choice.token_ids) for choice in request.continue_from}
        finished = {choice.index for choice in request.continue_from if choice.finished}
        started = pb.Started(
            request_id=request.request_id or f"drawn-{len(self.requests)}", model="fake", seed=seed, prompt_tokens=3
        )
        wants = request.output
        if wants.prompt_token_ids:
            started.prompt_token_ids.extend([11, 12, 13])
        first = True
        while len(finished) < n:
            message = pb.GenerateStreamResponse()
            if first:
                message.started.CopyFrom(started)
                first = False
                if wants.HasField("prompt_logprobs") and not any(done.values()):
                    message.prompt_logprobs.add(token_id=12, logprob=-0.5, rank=1)
                    message.prompt_logprobs.add(token_id=13, logprob=-1.5, rank=4)
            for choice in range(n):
                if choice in finished:
                    continue
                at = done.get(choice, 0)
                ids = [token(seed, choice, p) for p in range(at, min(limit, at + self.tokens_per_message))]
                done[choice] = at + len(ids)
                delta = message.choices.add(index=choice, token_ids=ids, text="".join(map(piece, ids)))
                if wants.HasField("logprobs"):
                    for token_id in ids:
                        entry = delta.logprobs.add(token_id=token_id, logprob=-token_id / 4096, rank=2)
                        for k in range(wants.logprobs):
                            entry.top.add(token_id=k, logprob=-k)
                if done[choice] >= limit - choice:  # later choices are shorter
                    delta.finish.reason = pb.FINISH_REASON_LENGTH
                    finished.add(choice)
            yield message
        yield pb.GenerateStreamResponse(
            usage=pb.Usage(prompt_tokens=3, completion_tokens=sum(done.values()), cached_tokens=2)
        )

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        text = request.text or "|".join(f"{m.role}:{m.content}" for m in request.chat.messages)
        return pb.TokenizeResponse(model="fake", ids=[*([] if request.no_bos else [1]), *text.encode()])

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
        return pb.DetokenizeResponse(model="fake", text="".join(map(piece, request.ids)) + ("" if skip else "<s>"))

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        model = pb.Model(
            name="fake", architecture="llama", fingerprint="ab" * 32, context_length=128, vocab_size=32000,
            max_sequence_tokens=128, eos_token_ids=[2], accepts_text=True, accepts_chat=True,
            executors_ready=1, executors_expected=2,
        )  # fmt: skip
        model.defaults.temperature = 0.5
        return pb.ListModelsResponse(models=[model])
