"""What the client hands to its caller: plain, frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import grpc

from protos.stepwire.v1 import inference_pb2 as pb
from stepwire.errors import RequestError

Reason = Literal["stop", "length"]
_REASONS: dict[int, Reason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. `matched`: the EOS or stop id, or the stop string; None where a length ended it."""

    reason: Reason
    matched: int | str | None = None

    @classmethod
    def of(cls, message: pb.Finish) -> Finish:
        reason = _REASONS.get(message.reason)
        if reason is None:
            raise RequestError(grpc.StatusCode.INTERNAL, f"finish reason {message.reason} is not known to this client")
        which = message.WhichOneof("matched")
        return cls(reason, None if which is None else getattr(message, which))


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    model: str
    seed: int
    prompt_tokens: int
    prompt_token_ids: tuple[int, ...] = ()  # where they were asked for


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: the connection broke between the last token and the server's count


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`rank` 1 is the most likely; `top` holds (id, logprob) of the most likely ids, in order."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, message: pb.TokenLogprob) -> TokenLogprob:
        top = tuple((entry.token_id, entry.logprob) for entry in message.top)
        return cls(message.token_id, message.logprob, message.rank, top)


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text and new token ids of one choice, to be appended. `finish` is set in the choice's last chunk. `logprobs`
    holds one entry for each id, where they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    started: Started
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of prompt tokens 1, 2, ... (counted from 0)

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    architecture: str
    fingerprint: str
    context_length: int  # tokens, prompt and output together
    vocab_size: int
    max_sequence_tokens: int  # what the largest known executor can hold
    eos_token_ids: tuple[int, ...]
    temperature: float  # the model's own sampling defaults
    top_k: int
    top_p: float
    min_p: float
    accepts_text: bool
    accepts_chat: bool
    executors_ready: int
    executors_expected: int

    @classmethod
    def of(cls, message: pb.Model) -> Model:
        return cls(
            name=message.name,
            architecture=message.architecture,
            fingerprint=message.fingerprint,
            context_length=message.context_length,
            vocab_size=message.vocab_size,
            max_sequence_tokens=message.max_sequence_tokens,
            eos_token_ids=tuple(message.eos_token_ids),
            temperature=message.defaults.temperature,
            top_k=message.defaults.top_k,
            top_p=message.defaults.top_p,
            min_p=message.defaults.min_p,
            accepts_text=message.accepts_text,
            accepts_chat=message.accepts_chat,
            executors_ready=message.executors_ready,
            executors_expected=message.executors_expected,
        )
