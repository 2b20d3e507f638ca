"""Scheduler core <-> executor messages: msgspec over ZeroMQ, ROUTER (core) and DEALER (executor).

A session
---------
::

    executor                                core
      | -- Hello(versions, model, limits) --> |     one fresh socket a session, linger 0
      | <-- Welcome(epoch, version) --------- |     or Refused(reason): close, back off, try again
      | <-- StepPlan(epoch, seq=1, ...) ----- |     plans run in the order sent; up to `depth` unanswered
      | -- StepResult(epoch, seq=1, ...) ---> |
      |            ...                        |
      | -- EpochLost(epoch, code) ----------> |     the executor's view of the batch differs from the plan's digest
      | <-- Welcome(epoch', version) -------- |     a Welcome always means: no slot, no block, next seq is 1

A frame from a peer that the core does not know is answered with ``Rehello``; the executor then opens a new session.

A plan is a delta
-----------------
Applied in this order, each part against the result of the former: ``released``, ``admitted``, ``appended``, then the
rows run: all of ``decode``, then all of ``prefill``. The plan order is the memory model of the device: a block or slot
freed by plan n may be given out by plan n itself.

Rows
----
A *decode* row runs the one known token that has no KV yet. A *prefill* row ``(slot, count)`` runs the next ``count``
known tokens (prompt, then outputs); when none is left unrun after it, it samples. ``computed`` (tokens whose KV is
written) starts at ``Admission.computed`` and grows by what each plan runs; both sides count it alone.

The digest
----------
``protos.digest.plan_digest`` chains over every plan of the epoch. The executor checks it after applying the delta and
before it runs a row. See there.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from protos.wire import U64, Count, Epoch, Name, Positive, Sha256, Text

PROTOCOL_VERSIONS: tuple[int, ...] = (1,)  # newest first: version N and N - 1 talk


# --------------------------------------------------------------------------------------------------------------------
# Facts that an executor states about itself. Every number is bounded: a hostile Hello must not size anything.


class Asset(msgspec.Struct, array_like=True, frozen=True):
    """A file the scheduler may fetch: kind is ``tokenizer.json``, ``chat_template.jinja``, ``generation_config.json``
    or ``tokenizer_config.json``."""

    kind: Name
    sha256: Sha256
    size: Annotated[int, msgspec.Meta(ge=0, le=64 * 1024 * 1024)]


class ModelCard(msgspec.Struct, array_like=True, frozen=True):
    name: Name  # the name clients ask for
    architecture: Name
    fingerprint: Sha256  # architecture and weights
    numerics: Sha256  # fingerprint, dtype, backend and flags: equal numerics continue each other's requests
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**24)]
    context_length: Annotated[int, msgspec.Meta(ge=1, le=2**24)]  # tokens, prompt and output together
    eos_token_ids: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    assets: Annotated[tuple[Asset, ...], msgspec.Meta(max_length=16)]


class Limits(msgspec.Struct, array_like=True, frozen=True):
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=2**26)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]  # tokens
    max_slots: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    max_batch_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # new tokens a step
    max_drafts: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0  # draft tokens a row the executor may propose


# --------------------------------------------------------------------------------------------------------------------
# Parameters of one sequence, as the executor needs them. What only the core or the API worker needs (stop
# strings, max_tokens, ignore_eos) is not here.


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0  # below 1e-5: argmax, lowest id on ties
    top_k: Count = 0  # 0: off
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    seed: U64 = 0  # drawn by the API worker where the client gave none
    min_tokens: Count = 0  # ids of `masked_until_min_tokens` cannot be drawn before this many outputs
    masked_until_min_tokens: bytes = b""  # int32 ids: EOS set and stop ids
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=1000.0)] = 1.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)] = 0.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)] = 0.0
    logit_bias_ids: bytes = b""  # int32 ids
    logit_bias: bytes = b""  # float32, one an id
    allowed_ids: bytes = b""  # int32 ids; empty: all
    logprobs: Annotated[int, msgspec.Meta(ge=-1, le=1024)] = -1  # -1: none; k: the drawn token's and the top k
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=-1, le=1024)] = -1  # the same for prompt tokens 1, 2, ...
    grammar: str = ""  # id of a prepared grammar; empty: none


class Admission(msgspec.Struct, array_like=True, frozen=True):
    """A sequence enters a slot: new, or continued with the outputs it already has. Nothing else restarts anything."""

    slot: Count
    generation: Count  # of the slot; grows by one with each admission to it
    request_id: Name  # for logs and errors only
    choice: Count  # choice index, part of the drawing key
    prompt: bytes  # int32 token ids, at least one
    outputs: bytes  # int32 token ids so far; prompt and output stay apart for ever
    computed: Count  # tokens whose KV the blocks already hold (prefix cache): a multiple of block_size
    blocks: bytes  # int32 block ids, in order; the first computed / block_size are shared and never written
    sampling: SamplingParams
    prompt_scored: Count = 0  # prompt tokens before this position have had their logprobs: they are not sent again


# --------------------------------------------------------------------------------------------------------------------
# core -> executor


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="W"):
    epoch: Epoch
    version: Positive
    depth: Positive  # plans the core keeps unanswered: sizes the executor's staging buffers


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="R"):
    reason: Text
    retry_after: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]  # seconds


class Rehello(msgspec.Struct, array_like=True, frozen=True, tag="r"):
    """The core does not know this session (it restarted, or gave the session up)."""


class StepPlan(msgspec.Struct, array_like=True, frozen=True, tag="P"):
    """At 256 rows and more steady decode costs at most 6 bytes a row: 4 a row, 8 for each block appended."""

    epoch: Epoch
    seq: Positive
    digest: U64  # of the mirror after this plan's delta
    decode: bytes = b""  # int32 slot a row
    released: bytes = b""  # int32 slots
    appended: bytes = b""  # int32 pairs (slot, block), in order
    admitted: tuple[Admission, ...] = ()
    prefill: bytes = b""  # int32 pairs (slot, count)
    max_new: bytes = b""  # uint8 a decode row: the most tokens it may yield (drafts); empty: 1 each


class Prepare(msgspec.Struct, array_like=True, frozen=True, tag="p"):
    """Compile a grammar off the step path; answered by Prepared or Failed, outside the plan order."""

    grammar: Name
    kind: Name  # json_schema, regex, ebnf, choice
    source: Annotated[str, msgspec.Meta(max_length=1024 * 1024)]


class Forget(msgspec.Struct, array_like=True, frozen=True, tag="F"):
    grammar: Name


class FetchAsset(msgspec.Struct, array_like=True, frozen=True, tag="a"):
    sha256: Sha256
    offset: Count
    length: Annotated[int, msgspec.Meta(ge=1, le=1024 * 1024)]


class Drain(msgspec.Struct, array_like=True, frozen=True, tag="D"):
    """The core will send no plan after those already sent; say Goodbye when they are answered."""


class Ping(msgspec.Struct, array_like=True, frozen=True, tag="k"):
    """Sent when nothing else was for a while: a ROUTER_MANDATORY send finds a vanished peer."""


class Need(msgspec.Struct, array_like=True, frozen=True, tag="n"):
    """Answers AskNeed: how well this scheduler is served with that model now."""

    executors: Count  # of the model, here now
    requests: Count  # live ones of the model


ToExecutor = Welcome | Refused | Rehello | StepPlan | Prepare | Forget | FetchAsset | Drain | Ping | Need


# --------------------------------------------------------------------------------------------------------------------
# executor -> core


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="H"):
    versions: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=16)]
    executor: Name  # stable name (host, or given); quarantine is kept by it
    instance: U64  # random, drawn once by each executor process
    model: ModelCard
    limits: Limits
    device: Text = ""  # for operators


# Row faults: a fault of a row is that row's alone.
NON_FINITE = 1  # logits held NaN or infinity everywhere it matters
GRAMMAR_FAULT = 2
ALL_MASKED = 3  # no id may be drawn
BAD_PARAMETER = 4


class RowFault(msgspec.Struct, array_like=True, frozen=True):
    slot: Count
    generation: Count
    status: Positive
    detail: Text = ""


class RowLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Raw log probabilities of one drawn or prompt token: natural logarithms, of the model itself, before any bias,
    mask, penalty or temperature. -inf where the model gives a token no chance."""

    position: Count  # index into the sequence (prompt and outputs together) of the token
    chosen: float
    rank: Positive  # 1: the most likely; ids of equal probability are ordered by id
    top_ids: bytes = b""  # int32, the first of that order; the token itself is among them if its rank says so
    top_values: bytes = b""  # float32


class SlotLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of one plan: prompt positions in order, without a gap over the plans that run them, or the one drawn token's."""

    slot: Count
    generation: Count
    rows: tuple[RowLogprobs, ...]


class StepResult(msgspec.Struct, array_like=True, frozen=True, tag="S"):
    """The sampled tokens of one plan, in the order of its sampling rows: 10 bytes a row.

    ``slots`` and ``generations`` are stated, not implied, so that an executor that answers for rows it was not asked
    for, or for a slot's earlier tenant, is found out.
    """

    epoch: Epoch
    seq: Positive
    digest: U64  # the plan's, checked by the executor
    slots: bytes = b""  # int32, one a sampling row
    generations: bytes = b""  # uint16 (low 16 bits), one a sampling row
    tokens: bytes = b""  # int32, counts[i] of them a row
    counts: bytes = b""  # uint8 a sampling row; empty: 1 each
    faults: tuple[RowFault, ...] = ()  # those rows have no tokens and are not in slots
    logprobs: tuple[SlotLogprobs, ...] = ()
    round_us: Count = 0  # microseconds the plan took in the executor, for step-age limits and operators


# Why an epoch was lost.
DIGEST_MISMATCH = 1
BAD_SEQUENCE = 2
BAD_PLAN = 3  # a plan that contradicts the mirror: unknown slot, block out of range, more tokens than known ...
OUT_OF_MEMORY = 4  # the batch's shape: makes no row suspect
STEP_FAILED = 5  # the forward or the sampling of the whole batch raised


class EpochLost(msgspec.Struct, array_like=True, frozen=True, tag="E"):
    epoch: Epoch
    seq: Count  # the plan at fault
    code: Positive
    detail: Text = ""


class Prepared(msgspec.Struct, array_like=True, frozen=True, tag="g"):
    grammar: Name


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="f"):
    grammar: Name
    detail: Text


class AssetChunk(msgspec.Struct, array_like=True, frozen=True, tag="A"):
    sha256: Sha256
    offset: Count
    data: Annotated[bytes, msgspec.Meta(max_length=1024 * 1024)]  # empty: the executor has no such asset


class Load(msgspec.Struct, array_like=True, frozen=True, tag="L"):
    """Sent about once a second and on change; for routing and operators, never for correctness."""

    slots_used: Count
    blocks_used: Count
    memory_bytes: U64
    steps: U64


class Draining(msgspec.Struct, array_like=True, frozen=True, tag="d"):
    """The executor wants to leave: its sequences are to finish or to continue elsewhere; then the core sends Drain."""


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag="G"):
    reason: Text


class AskNeed(msgspec.Struct, array_like=True, frozen=True, tag="N"):
    """Before any Hello, from an executor that may choose between schedulers. One of an earlier version says nothing."""

    model: Name


ToCore = Hello | StepResult | EpochLost | Prepared | Failed | AssetChunk | Load | Draining | Goodbye | AskNeed
