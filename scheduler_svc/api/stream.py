"""One open stream: its choices, what the client still has to get, and its one end.

The core link calls ``on_...`` as messages come; one coroutine of the service takes what has gathered (``take``).
Nothing here waits for the network: a slow client costs the memory of the ids it has not read, and nobody's time.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from protos import front
from protos.step import SamplingParams
from protos.stepwire.v1 import inference_pb2 as pb
from protos.wire import pack_int32, unpack_int32
from scheduler_svc.api import door
from scheduler_svc.api.logprobs import Logprobs, MissingLogprobs
from scheduler_svc.api.refusal import Refusal, relayed, unavailable
from scheduler_svc.api.request import Request
from scheduler_svc.api.text.lanes import DEAR_IDS, Lanes
from scheduler_svc.api.text.output import End, Output

_REASONS = {
    front.STOP_EOS: pb.FINISH_REASON_STOP,
    front.STOP_ID: pb.FINISH_REASON_STOP,
    front.STOP_TEXT: pb.FINISH_REASON_STOP,
    front.LENGTH: pb.FINISH_REASON_LENGTH,
}


_NEVER = (0.0, 0.0)


def _now() -> tuple[float, float]:
    """Monotonic seconds, and the processor time that this process has used."""
    return time.monotonic(), time.process_time()


@dataclass(slots=True)
class ChoiceState:
    """``raw`` are ids not yet looked at, by `Stream.look` or when a message is made."""

    output: Output
    raw: list[int] = field(default_factory=list)
    finished: front.Finished | None = None  # the core's word, not yet looked at either: it comes after ``raw``
    looked: int = 0  # ids of which the core was told whether there is a stop string in them
    sent: int = 0  # ids the client has, those it continued from included
    finish_sent: bool = False
    running: bool = True  # the core still owes the end
    cached_tokens: int = -1

    @property
    def received(self) -> int:
        return len(self.output.ids) + len(self.raw)


class Stream:
    """Made from a request; ``resume`` before anything else."""

    def __init__(self, request: Request, *, streaming: bool) -> None:
        self.request = request
        self.streaming = streaming  # else nothing is wanted before the end
        self.unlooked = 0  # ids that came since `look`
        self.fresh = streaming  # no message with a token was made yet
        self.choices: dict[int, ChoiceState] = {}
        self.error: Refusal | None = None
        self.accepted = False
        self.evicted = False  # the client reads too slowly
        self.writing_since = 0.0  # monotonic; 0: no write in flight
        self.task: asyncio.Task[None] | None = None
        self.opened = time.monotonic()
        self.submitted_at = _NEVER
        self.first_token_at = _NEVER
        self._started_sent = False
        self._done_sent = False
        self._finished_before = 0  # ids of choices that the client has whole
        self._changed = asyncio.Event()
        for index in range(request.choices):
            before = request.continued.get(index)
            if before is not None and before.finished:
                self._finished_before += len(before.ids)
                continue
            self.choices[index] = ChoiceState(request.output())
        self._continued = 0
        sampling = request.sampling
        self.logprobs: Logprobs | None = None
        if sampling.logprobs >= 0 or sampling.prompt_logprobs >= 0:
            had_tokens = any(len(before.ids) for before in request.continued.values())
            prompt = unpack_int32(request.prompt)
            self.logprobs = Logprobs(prompt, sampling.logprobs, -1 if had_tokens else sampling.prompt_logprobs)

    async def resume(self, lanes: Lanes) -> None:
        """Takes in what the client has of each choice already. Raises Refusal where that goes past an end."""
        for index, choice in self.choices.items():
            before = self.request.continued.get(index)
            if before is None:
                continue
            output, taken = choice.output, 0
            async for part in lanes.turns(len(before.ids), DEAR_IDS):
                taken += output.push(before.ids[part].tolist())
                output.take_text()  # the client has it
            door.check_continued(index, len(before.ids), taken)
            choice.sent, choice.running = len(output.ids), output.end is None
        self._continued = self.completion_tokens
        if not self._running:
            self.accepted = True  # nothing is left for the core

    # ----------------------------------------------------------------------------------------------------------------
    # For the core link

    def submission(self, number: int) -> front.Submit | None:
        """What the core has to run, as of now; None where nothing is left."""
        self.settle_all()
        running = {index: choice for index, choice in self.choices.items() if choice.running}
        if not running:
            return None
        self.submitted_at = _now()
        request = self.request
        return front.Submit(
            stream=number,
            request_id=request.request_id,
            model=request.model.name,
            prompt=request.prompt,
            choices=tuple(front.Choice(i, pack_int32(choice.output.ids)) for i, choice in running.items()),
            sampling=self._sampling(),
            max_tokens=request.max_tokens,
            stop_ids=pack_int32(request.stop_ids),
            ignore_eos=request.ignore_eos,
            stops_on_text=request.stops is not None,
            tenant=request.tenant,
            bypass_cache=request.bypass_cache,
            priority=request.priority,
            arrival=request.arrival,
            deadline=request.deadline,
            block_hashes=request.block_hashes,
            continuation=request.is_continuation or self.accepted,
        )

    def _sampling(self) -> SamplingParams:
        """The request's, without what has come already: prompt logprobs cost the whole prompt, and its cache hits."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs >= 0 and self.logprobs is not None and self.logprobs.prompt_here:
            return msgspec.structs.replace(sampling, prompt_logprobs=-1)
        return sampling

    def on_accepted(self) -> None:
        self.accepted = True
        self._changed.set()

    def on_refused(self, message: front.Rejected | front.Failed) -> None:
        self.on_link_lost()
        if not self._running:
            return  # every choice had ended here: the core failed on what nobody will see
        refusal = relayed(message)
        if refusal.code == front.NOT_FOUND and self.accepted:
            # Accepted once: the model is known, its executors are away.
            refusal = unavailable(refusal.message, refusal.retry_after)
        self.fail(refusal)

    def on_tokens(self, index: int, tokens: list[int]) -> None:
        """Takes new ids of a choice; what they mean is looked at later."""
        choice = self.choices.get(index)
        if choice is None or not choice.running or choice.output.end is not None:
            return
        if self.first_token_at is _NEVER:
            self.first_token_at = _now()
        choice.raw += tokens

    def look(self, number: int, seen: list[tuple[int, int, int]]) -> list[front.Stop]:
        """Looks for stop strings in what came. Returns the ends that the core has to know, and adds to ``seen``
        (``number``, choice, ids) how far there is none."""
        stops: list[front.Stop] = []
        if self.request.stops is None or self.error is not None:
            return stops
        for index, choice in self.choices.items():
            self._settle(choice)
            count, end = len(choice.output.ids), choice.output.end
            if not choice.running or count == choice.looked:
                continue
            choice.looked = count
            if end is None:
                seen.append((number, index, count))
            elif end.reason == front.STOP_TEXT:
                stops.append(front.Stop(number, index, count))
        return stops

    def on_finished(self, message: front.Finished) -> None:
        choice = self.choices.get(message.choice)
        if choice is None or not choice.running:
            return
        choice.cached_tokens = message.cached_tokens
        choice.running = False
        choice.finished = message

    def on_link_lost(self) -> None:
        """The core will say no more of this submission: choices that have ended here need nothing from it."""
        self.settle_all()
        for choice in self.choices.values():
            if choice.output.end is not None:
                choice.running = False
        if not self._running:
            self.wake()

    def fail(self, refusal: Refusal) -> None:
        """Ends the stream; the first error counts, and none after the end."""
        if not self.ended:
            self.error = refusal
        self._changed.set()

    def wake(self) -> None:
        """Something may be there for the writer."""
        if self.streaming or self.error is not None or not self._running:
            self._changed.set()

    # ----------------------------------------------------------------------------------------------------------------
    # For the service

    async def wait_accepted(self) -> None:
        """Returns at acceptance, or raises the Refusal."""
        while not self.accepted:
            if self.error is not None:
                raise self.error
            await self._changed.wait()
            self._changed.clear()

    async def next(self) -> pb.GenerateStreamResponse | None:
        """The next message, or None after the last. Raises the Refusal that ended the stream, after what came before
        it was taken."""
        while True:
            self._changed.clear()
            message = self.take()
            if message is not None:
                return message
            if self._done_sent:
                return None
            if self.error is not None:
                raise self.error
            await self._changed.wait()

    def take(self) -> pb.GenerateStreamResponse | None:
        """Everything the client has not got yet, as one message; None where there is nothing."""
        message = pb.GenerateStreamResponse()
        if not self._started_sent:
            self._started_sent = True
            message.started.CopyFrom(self.started())
        if self.logprobs is not None and self.logprobs.prompt_pending:
            message.prompt_logprobs.extend(self.logprobs.take_prompt())
            if self.logprobs.prompt_pending and self.logprobs.prompt_here:
                return message  # the rest of them come first
        for index, choice in self.choices.items():
            if choice.finish_sent:
                continue
            self._settle(choice)
            output = choice.output
            count = len(output.ids)
            text = output.take_text()
            if count == choice.sent and not text and output.end is None:
                continue
            self.fresh = False
            delta = message.choices.add(index=index, text=text, token_ids=output.ids[choice.sent :])
            if self.logprobs is not None:
                self._check_prompt_logprobs()
                delta.logprobs.extend(self.logprobs.take(index, choice.sent, output.ids[choice.sent :]))
            choice.sent = count
            if output.end is not None:
                choice.finish_sent = True
                _write_finish(delta.finish, output.end)
        if not self._done_sent and not self._running and self.error is None:
            self._done_sent = True
            message.usage.CopyFrom(self.usage())
        if message.choices or message.prompt_logprobs or message.HasField("started") or message.HasField("usage"):
            return message
        return None

    async def whole(self, lanes: Lanes) -> pb.GenerateResponse:
        """The whole answer, at the end. Raises the Refusal that ended the stream."""
        while self._running and self.error is None:
            self._changed.clear()
            await self._changed.wait()
        self.settle_all()
        if self.error is not None:
            raise self.error
        response = pb.GenerateResponse(started=self.started(), usage=self.usage())
        if self.logprobs is not None:
            async for _ in lanes.turns(self.logprobs.prompt_messages, 1):
                response.prompt_logprobs.extend(self.logprobs.take_prompt())
            self._check_prompt_logprobs()
        for index, choice in self.choices.items():
            output = choice.output
            result = response.choices.add(index=index, text=output.take_text(), token_ids=output.ids[choice.sent :])
            if self.logprobs is not None:
                async for part in lanes.turns(len(output.ids) - choice.sent, self.logprobs.outputs_at_once):
                    ids = output.ids[choice.sent + part.start : choice.sent + part.stop]
                    result.logprobs.extend(self.logprobs.take(index, choice.sent + part.start, ids))
            choice.sent = len(output.ids)
            assert output.end is not None
            _write_finish(result.finish, output.end)
        return response

    def started(self) -> pb.Started:
        request = self.request
        return pb.Started(
            request_id=request.request_id,
            model=request.model.name,
            seed=request.sampling.seed,
            prompt_tokens=request.prompt_tokens,
            prompt_token_ids=request.echo.ids,
        )

    def usage(self) -> pb.Usage:
        # With several choices the first to be admitted computes the prompt and the others find it.
        cached = [choice.cached_tokens for choice in self.choices.values() if choice.cached_tokens >= 0]
        return pb.Usage(
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=self._finished_before + self.completion_tokens,
            cached_tokens=min(cached, default=0),
        )

    def first_token_times(self) -> dict[str, object]:
        """For the log, now that its message is made: pairs of monotonic seconds and this process's processor time."""
        times = {"submitted": self.submitted_at, "came": self.first_token_at, "made": _now()}
        return {"request": self.request.request_id, **times}

    @property
    def ended(self) -> bool:
        """Nothing more can come."""
        return self.error is not None or (self.accepted and not self._running)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.received for choice in self.choices.values())

    @property
    def new_tokens(self) -> int:
        """Ids that came from the core for this client."""
        return self.completion_tokens - self._continued

    @property
    def unread(self) -> int:
        """Ids that wait for the client."""
        return sum(choice.received - choice.sent for choice in self.choices.values())

    def on_logprobs(self, index: int, data: bytes) -> None:
        if self.logprobs is not None:
            self.logprobs.add(index, data)

    def _check_prompt_logprobs(self) -> None:
        """They are all there before the first token."""
        if self.logprobs is not None and self.logprobs.prompt_pending:
            raise MissingLogprobs("not all log probabilities of the prompt came")

    def settle_all(self) -> None:
        for choice in self.choices.values():
            self._settle(choice)

    def _settle(self, choice: ChoiceState) -> None:
        """Looks at what came of a choice, and at the core's word of its end."""
        output = choice.output
        if choice.raw:
            output.push(choice.raw)
            choice.raw = []
        message, choice.finished = choice.finished, None
        if message is None or output.end is not None:
            return
        if message.outputs != len(output.ids):
            here, there = len(output.ids), message.outputs
            self.error = self.error or unavailable(
                f"choice {message.choice} has {here} tokens here and {there} in the core"
            )
        elif message.reason in _REASONS and message.reason != front.STOP_TEXT:
            output.finish(End(message.reason, message.stop_token))
        else:
            self.error = self.error or Refusal(front.ABORTED, "the request was cancelled")

    @property
    def _running(self) -> bool:
        return any(choice.running for choice in self.choices.values())


def _write_finish(finish: pb.Finish, end: End) -> None:
    finish.reason = _REASONS[end.reason]
    if end.reason == front.STOP_EOS:
        finish.eos_token_id = end.token
    elif end.reason == front.STOP_ID:
        finish.stop_token_id = end.token
    elif end.reason == front.STOP_TEXT:
        finish.stop = end.stop
