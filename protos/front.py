"""API worker <-> scheduler core messages: msgspec MessagePack over ZeroMQ ipc, ROUTER (core) and DEALER (API worker).

::

    API worker                              core
      | -- Attach(worker, incarnation) ---> |
      | <-- Attached(incarnation) --------- |   a new incarnation: the core restarted; submit every open stream again
      | <-- Models(...) ------------------- |   again on every change of the fleet
      | -- Submit(stream, ...) -----------> |   one per stream; `outputs` non-empty: a continuation
      | <-- Accepted(stream) -------------- |   or Rejected: the stream never existed
      | <-- Tokens(...), Finished(...) ---- |   every choice has exactly one end: Finished or Failed
      | -- Credit(tokens, allowance) -----> |   cumulative; the core keeps at most `window` tokens unacknowledged
      | -- Stop(...), Cancel(...) --------> |

The core knows token ids only. ``stream`` numbers are chosen by the worker, unique within its incarnation.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from protos.step import Asset, SamplingParams
from protos.wire import U64, Count, Name, Positive, Sha256, Text

FRONT_VERSION = 1


# --------------------------------------------------------------------------------------------------------------------
# API worker -> core


class Attach(msgspec.Struct, array_like=True, frozen=True, tag="A"):
    version: Positive
    worker: Name
    incarnation: U64  # of the worker: random, drawn at start
    window: Positive = 65536  # tokens the worker lets the core have unacknowledged, whatever Credit says


class Choice(msgspec.Struct, array_like=True, frozen=True):
    """One choice to run. A choice that has already ended is not submitted."""

    index: Count
    outputs: bytes = b""  # int32 ids so far; not empty: this choice continues


class Submit(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="S"):
    stream: Count
    request_id: Name
    model: Name
    prompt: bytes  # int32 ids
    choices: Annotated[tuple[Choice, ...], msgspec.Meta(min_length=1, max_length=128)]
    sampling: SamplingParams
    max_tokens: Count  # outputs a choice, those it continues from included; 0: up to the context's end
    stop_ids: bytes = b""  # int32 ids that end a choice, besides the model's EOS set
    ignore_eos: bool = False
    stops_on_text: bool = False  # stop strings are searched in the worker: bound the run-ahead past its acknowledgement
    tenant: Text = ""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0  # lower goes first
    arrival: float  # Unix seconds, of the first acceptance anywhere: a continuation keeps it
    deadline: float = 0.0  # Unix seconds; 0: none
    block_hashes: bytes = b""  # 16 bytes for each full prompt block (scheduler_svc.prefix_hash); empty: no lookup
    bypass_cache: bool = False  # neither look up nor leave anything in the prefix cache
    continuation: bool = False  # bypasses queue limits, goes first, fences a live request with this id


class Stop(msgspec.Struct, array_like=True, frozen=True, tag="s"):
    """A stop string was completed by output token number ``outputs`` (a count): the choice ends there."""

    stream: Count
    choice: Count
    outputs: Count


class Seen(msgspec.Struct, array_like=True, frozen=True, tag="n"):
    """For ``stops_on_text`` streams: no stop string within the first ``outputs[i]`` tokens of each choice named."""

    streams: bytes  # int32
    choices: bytes  # int32
    outputs: bytes  # int32


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag="C"):
    stream: Count


class Credit(msgspec.Struct, array_like=True, frozen=True, tag="c"):
    tokens: U64  # tokens received since Attach that the worker has dealt with (cumulative)
    allowance: Count = 0  # tokens unacknowledged at which choices past their first token stand still; 0: as before


class FetchAsset(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    sha256: Sha256
    offset: Count
    length: Annotated[int, msgspec.Meta(ge=1, le=1024 * 1024)]


class GetStatus(msgspec.Struct, array_like=True, frozen=True, tag="g"):
    """Answered by Status: for the admin service, metrics and tests."""

    ticket: Count
    request_id: Text = ""  # not empty: also why that request waits
    check_invariants: bool = False


DRAIN_EXECUTOR = "drain"
FLUSH_PREFIX_CACHE = "flush"


class Control(msgspec.Struct, array_like=True, frozen=True, tag="x"):
    """An operator's wish (the admin service). Answered by Status: its body has ``error`` ("": done), and what there is
    to say."""

    ticket: Count
    action: Name
    executor: Text = ""  # name or session in hex; empty: all (flush only)


class Detach(msgspec.Struct, array_like=True, frozen=True, tag="D"):
    """The worker leaves (or the supervisor says that it died): its streams are cancelled."""

    worker: Name
    incarnation: U64


ToCore = Attach | Submit | Stop | Seen | Cancel | Credit | FetchAsset | GetStatus | Control | Detach


# --------------------------------------------------------------------------------------------------------------------
# core -> API worker


class Attached(msgspec.Struct, array_like=True, frozen=True, tag="A"):
    incarnation: U64  # of the core


class Reattach(msgspec.Struct, array_like=True, frozen=True, tag="r"):
    """The core does not know this worker (it restarted): Attach again, then submit every open stream again."""


class ModelState(msgspec.Struct, array_like=True, frozen=True):
    name: Name
    architecture: Name
    fingerprint: Sha256
    vocab_size: Positive
    context_length: Positive
    block_size: Positive
    eos_token_ids: tuple[Count, ...]
    assets: tuple[Asset, ...]
    executors_ready: Count
    executors_expected: Count  # gone, and expected back: requests wait for these, bounded
    max_sequence_tokens: Count  # the largest prompt + output that any known executor can hold
    total_blocks: Count
    free_blocks: Count  # free or evictable
    running: Count
    waiting: Count


class Models(msgspec.Struct, array_like=True, frozen=True, tag="M"):
    models: tuple[ModelState, ...]


class Accepted(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    stream: Count


# Codes of Rejected and Failed are gRPC status numbers.
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
ALREADY_EXISTS = 6
RESOURCE_EXHAUSTED = 8
ABORTED = 10
INTERNAL = 13
UNAVAILABLE = 14


class Rejected(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag="R"):
    """Refused before anything was produced; the worker turns it into a gRPC status with details."""

    stream: Count
    code: Count
    message: Text
    field: Text = ""
    value: Text = ""
    limit: Text = ""
    retry_after: float = 0.0  # seconds; 0: do not say


class Tokens(msgspec.Struct, array_like=True, frozen=True, tag="T"):
    """New tokens of many choices at once. Row i: ``counts[i]`` tokens of choice ``choices[i]`` of ``streams[i]``."""

    streams: bytes  # int32
    tokens: bytes  # int32, sum(counts)
    choices: bytes = b""  # uint8 a row; empty: all 0
    counts: bytes = b""  # uint8 a row; empty: all 1
    logprobs: tuple[tuple[int, int, bytes], ...] = ()  # (stream, choice, encoded protos.step.RowLogprobs rows)


# Finish reasons.
STOP_EOS = 1
STOP_ID = 2
STOP_TEXT = 3
LENGTH = 4
CANCELLED = 5


class Finished(msgspec.Struct, array_like=True, frozen=True, tag="F"):
    """The one end of a choice that ran; sent after its last Tokens."""

    stream: Count
    choice: Count
    reason: Count
    outputs: Count  # tokens of this choice, those it continued from included; nothing past them counts
    cached_tokens: Count  # prompt tokens whose KV was found, at first admission
    stop_token: Annotated[int, msgspec.Meta(ge=-1)] = -1  # for STOP_EOS and STOP_ID


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    """The one end of a stream that could not go on: all its choices end."""

    stream: Count
    code: Count
    message: Text
    retry_after: float = 0.0


class AssetChunk(msgspec.Struct, array_like=True, frozen=True, tag="x"):
    sha256: Sha256
    offset: Count
    total: Count
    data: bytes


class Status(msgspec.Struct, array_like=True, frozen=True, tag="t"):
    ticket: Count
    body: dict[str, object]  # plain JSON-like values; keys are documented in scheduler_svc/core/status.py


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="k"):
    """Nothing else was sent for a while: finds vanished peers, and tells a worker that the core's loop turns."""

    incarnation: U64


ToWorker = Attached | Reattach | Models | Accepted | Rejected | Tokens | Finished | Failed | AssetChunk | Status | Ping
