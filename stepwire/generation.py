"""One request across any number of attempts: what was received so far, and the request that goes on from there.

No I/O: ``Client`` and ``AsyncClient`` drive the same state machine. ::

    attempt:  request() -> call -> feed(message) ... -> finished
                 ^                        |
                 +---- broke off: retry_after(error) seconds later, on the next address

Invariant: the chunks handed out, put together, are exactly ``token_ids`` of each choice, and that is what the next
attempt continues from: nothing is lost and nothing repeated.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from protos.stepwire.v1 import inference_pb2 as pb
from stepwire.errors import RequestError
from stepwire.types import Choice, Chunk, Completion, Finish, Started, TokenLogprob, Usage

PUSHBACK = "grpc-retry-pushback-ms"
FIRST_DELAY = 0.05  # seconds, then longer by GROWTH each time
GROWTH = 1.6
MAX_DELAY = 1.0

# A stream that ends with one of these broke off. CANCELLED is a server that stopped: our own cancel never gets here.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(slots=True)
class _ChoiceState:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: Finish | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


def pushback_seconds(metadata: Sequence[tuple[str, str | bytes]]) -> float | None:
    """Seconds the server asks to wait; negative: do not try again; None: it says nothing."""
    for key, value in metadata:
        if key == PUSHBACK:
            try:
                return float(int(value)) / 1000.0
            except ValueError:
                return -1.0  # the gRPC retry design: what cannot be read means "do not retry"
    return None


class Generation:
    """`retry_for`: seconds without a single message after which a broken request is given up; `timeout`: seconds for
    the whole request; `addresses`: how many servers are taken in turn (the first failure of each costs no delay).
    `on_break`: told why, when none of them could begin or go on, before they are tried again."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        *,
        timeout: float | None = None,
        retry_for: float = 60.0,
        addresses: int = 1,
        on_break: Callable[[RequestError], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._original = request
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._retry_for = retry_for
        self._addresses = addresses
        self._on_break = on_break
        self._failures = 0  # in a row
        self._last_progress = clock()
        n = request.sampling.n if request.sampling.HasField("n") else 1
        self._choices = [_ChoiceState() for _ in range(n)]
        self.started: Started | None = None
        self.usage: Usage | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.continuations = 0  # those that were accepted

    # ---- one attempt

    def request(self) -> pb.GenerateRequest:
        """The request of the next attempt: the original, or its continuation."""
        if self.started is None:
            return self._original
        request = pb.GenerateRequest()
        request.CopyFrom(self._original)
        # The server fences what is left of the first call by its id; the seed makes the rest the same.
        request.request_id = self.started.request_id
        request.model = self.started.model
        request.sampling.seed = self.started.seed
        for index, choice in enumerate(self._choices):
            request.continue_from.add(index=index, token_ids=choice.token_ids, finished=choice.finish is not None)
        return request

    def remaining(self) -> float | None:
        """Seconds to the deadline, for this attempt's own."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def feed(self, message: pb.GenerateStreamResponse) -> list[Chunk]:
        """One message of the stream -> the chunks to hand out."""
        self._failures = 0
        self._last_progress = self._clock()
        if message.HasField("started"):
            self._start(message.started)
        self.prompt_logprobs += [TokenLogprob.of(entry) for entry in message.prompt_logprobs]
        chunks = []
        for delta in message.choices:
            if not 0 <= delta.index < len(self._choices):
                raise RequestError(grpc.StatusCode.INTERNAL, f"the server sent choice {delta.index}, not asked for")
            choice = self._choices[delta.index]
            if choice.finish is not None:
                continue  # a continuation may state the end of a finished choice again
            choice.token_ids.extend(delta.token_ids)
            choice.text.append(delta.text)
            choice.finish = Finish.of(delta.finish) if delta.HasField("finish") else None
            logprobs = tuple(TokenLogprob.of(entry) for entry in delta.logprobs)
            choice.logprobs.extend(logprobs)
            if delta.text or delta.token_ids or choice.finish:
                chunks.append(Chunk(delta.index, delta.text, tuple(delta.token_ids), choice.finish, logprobs))
        if message.HasField("usage"):
            usage = message.usage
            self.usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return chunks

    def _start(self, message: pb.Started) -> None:
        prompt = tuple(message.prompt_token_ids)
        started = Started(message.request_id, message.model, message.seed, message.prompt_tokens, prompt)
        if self.started is None:
            self.started = started
            return
        self.continuations += 1
        if not any(choice.token_ids for choice in self._choices):
            self.prompt_logprobs.clear()  # the server sends them again, from the first one on
        if started.seed != self.started.seed:
            raise RequestError(
                grpc.StatusCode.DATA_LOSS, "the server continued with another seed: the text would break"
            )

    # ---- between attempts

    def broke_off(self) -> bool:
        """The stream ended without an error. True: before its end, so it is to be continued."""
        if self.usage is not None:
            return False
        return not self._settled()

    def retry_after(self, code: grpc.StatusCode, message: str, metadata: Sequence[tuple[str, str | bytes]]) -> float:
        """Seconds to wait before the next attempt, 0.0 or more; -1.0: none is needed, everything was received.

        Raises RequestError where trying again is of no use, or was tried for long enough.
        """
        if code in _BROKEN and self._settled():
            return -1.0
        pushback = pushback_seconds(metadata)
        error = RequestError(code, message)
        retryable = (
            code in _BROKEN
            or (code == grpc.StatusCode.RESOURCE_EXHAUSTED and pushback is not None)
            # Our own id, still live on the server that has not noticed yet that the connection broke.
            or (code == grpc.StatusCode.ALREADY_EXISTS and self._failures > 0)
        )
        if not retryable or (pushback is not None and pushback < 0):
            raise error
        self._failures += 1
        delay = pushback
        if delay is None:
            rounds = (self._failures - 1) // self._addresses  # every address once before any wait
            delay = 0.0
            if rounds or self._addresses == 1:
                exponent = min(rounds - (self._addresses > 1), 16)
                delay = min(FIRST_DELAY * GROWTH**exponent, MAX_DELAY) * random.uniform(0.75, 1.25)
        now = self._clock()
        if now + delay - self._last_progress > self._retry_for:
            raise RequestError(code, f"{message} (given up after {self._retry_for:g} s)")
        if self._deadline is not None and now + delay >= self._deadline:
            raise RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no time left to try again after {error}")
        # A stream that goes on elsewhere at once is nothing to speak of.
        if self._on_break is not None and self._failures == self._addresses + (self.started is not None):
            self._on_break(error)
        return delay

    def _settled(self) -> bool:
        """True, and `usage` known, when every choice has ended."""
        if self.started is None or any(choice.finish is None for choice in self._choices):
            return False
        if self.usage is None:
            tokens = sum(len(choice.token_ids) for choice in self._choices)
            self.usage = Usage(self.started.prompt_tokens, tokens, None)
        return True

    # ---- the end

    def completion(self) -> Completion:
        if self.started is None or self.usage is None:
            raise RequestError(grpc.StatusCode.INTERNAL, "the stream ended without its first or its last message")
        choices = []
        for index, choice in enumerate(self._choices):
            if choice.finish is None:
                raise RequestError(grpc.StatusCode.INTERNAL, f"the stream ended without the end of choice {index}")
            choices.append(
                Choice(index, "".join(choice.text), tuple(choice.token_ids), choice.finish, tuple(choice.logprobs))
            )
        return Completion(self.started, tuple(choices), self.usage, tuple(self.prompt_logprobs))


class Progress:
    """What can be asked of a stream, blocking or not, at any time."""

    _generation: Generation

    @property
    def started(self) -> Started | None:
        """None before the first message."""
        return self._generation.started

    @property
    def usage(self) -> Usage | None:
        """None before the last message."""
        return self._generation.usage

    @property
    def continuations(self) -> int:
        """How often the stream broke off and went on."""
        return self._generation.continuations
