"""The canonical request: what a client asked for, with every absent field decided.

Made once, at acceptance; everything later (the first submission, a continuation after the core restarted) reads it.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos.front import INVALID_ARGUMENT
from protos.step import SamplingParams
from protos.stepwire.v1 import inference_pb2 as pb
from protos.wire import LE_FLOAT32, LE_INT32, Int32, pack_int32
from scheduler_svc.api import door
from scheduler_svc.api.models import Model
from scheduler_svc.api.refusal import Refusal, invalid
from scheduler_svc.api.text.chat_template import TemplateFault
from scheduler_svc.api.text.detokenizer import Detokenizer
from scheduler_svc.api.text.lanes import IDS, Lanes
from scheduler_svc.api.text.output import Output
from scheduler_svc.api.text.stops import StopStrings
from scheduler_svc.api.text.tokenizer import MAX_PIECE_BYTES, SHORT_TEXT
from scheduler_svc.prefix_hash import extend_hashes, root_hash


@dataclass(frozen=True, slots=True)
class Continued:
    """What the client already has of one choice."""

    ids: Int32
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    request_id: str
    model: Model
    prompt: bytes  # int32 ids
    prompt_tokens: int
    starts_text: bool  # the output is a text of its own, not the prompt's going on
    sampling: SamplingParams
    choices: int
    max_tokens: int  # 0: up to the context's end
    limit: int  # outputs of a choice, at most: of max_tokens and the context
    stop: tuple[str, ...]
    stops: StopStrings | None
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool
    keep_special: bool  # special tokens are written out in the text
    echo: pb.TokenIds  # of the prompt, where they are asked for
    tenant: str
    bypass_cache: bool
    priority: int
    continued: dict[int, Continued]
    is_continuation: bool
    arrival: float  # Unix seconds
    deadline: float  # Unix seconds; 0: none
    block_hashes: bytes

    def output(self) -> Output:
        """An empty output of one choice."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            detokenizer, special = None, {}
        else:
            detokenizer = Detokenizer(tokenizer.pieces, self.starts_text, self.keep_special)
            special = {} if self.keep_special else tokenizer.pieces.special
        return Output(
            detokenizer,
            eos=frozenset() if self.ignore_eos else frozenset(self.model.state.eos_token_ids),
            stop_ids=frozenset(self.stop_ids),
            limit=self.limit,
            stops=self.stops,
            special_text=lambda token: special.get(token, ""),
            min_tokens=self.sampling.min_tokens,
            include_stop=self.include_stop,
        )


async def canonical(
    proto: pb.GenerateRequest, model: Model, *, tenant: str, arrival: float, deadline: float, lanes: Lanes
) -> Request:
    """Checks ``proto`` against ``model`` and completes it. ``lanes`` run what takes long. Raises Refusal.

    The form (door.check_form) was checked before the model was looked up.
    """
    door.check_against(proto, model)
    state = model.state
    allowed = proto.sampling.allowed_token_ids
    allowed_ids = np.sort(await checked_ids("sampling.allowed_token_ids", allowed, state.vocab_size, lanes))
    door.check_drawable(proto, model, allowed_ids)
    continued = {}
    for i, choice in enumerate(proto.continue_from):
        ids = await checked_ids(f"continue_from[{i}].token_ids", choice.token_ids, state.vocab_size, lanes)
        continued[choice.index] = Continued(ids, choice.finished)
    sampling = _sampling(proto, model, allowed_ids)
    tokens = await encode(proto, model, lanes)
    door.check_length(proto, model, len(tokens))
    echo = pb.TokenIds()
    if proto.output.prompt_token_ids:
        async for part in lanes.turns(len(tokens)):
            echo.ids.extend(tokens[part].tolist())
    room = state.context_length - len(tokens)
    max_tokens = min(proto.stopping.max_tokens, room) if proto.stopping.HasField("max_tokens") else 0
    stop = tuple(dict.fromkeys(proto.stopping.stop))
    keep_special = proto.output.HasField("skip_special_tokens") and not proto.output.skip_special_tokens
    return Request(
        request_id=proto.request_id or uuid.uuid4().hex,
        model=model,
        prompt=pack_int32(tokens),
        prompt_tokens=len(tokens),
        starts_text=proto.WhichOneof("prompt") == "chat",
        sampling=sampling,
        choices=proto.sampling.n if proto.sampling.HasField("n") else 1,
        max_tokens=max_tokens,
        limit=max_tokens or room,
        stop=stop,
        stops=_stop_strings(stop, model, keep_special),
        stop_ids=tuple(dict.fromkeys(proto.stopping.stop_token_ids)),
        ignore_eos=proto.stopping.ignore_eos,
        include_stop=proto.stopping.include_stop,
        keep_special=keep_special,
        echo=echo,
        tenant=tenant,
        bypass_cache=proto.bypass_prefix_cache,
        priority=proto.priority,
        continued=continued,
        is_continuation=bool(proto.continue_from),
        arrival=arrival,
        deadline=deadline,
        block_hashes=b"" if proto.bypass_prefix_cache else await _block_hashes(model, tenant, tokens, lanes),
    )


async def _block_hashes(model: Model, tenant: str, tokens: Int32, lanes: Lanes) -> bytes:
    """Of all full blocks: see `prefix_hash.block_hashes`."""
    size, data = model.state.block_size, pack_int32(tokens)
    hashes = [root_hash(model.state.fingerprint, tenant, size)]
    async for part in lanes.turns(len(tokens) // size, max(1, IDS // size)):
        extend_hashes(hashes, data[part.start * size * 4 : part.stop * size * 4], size)
    return b"".join(hashes[1:])


def _stop_strings(stop: tuple[str, ...], model: Model, keep_special: bool) -> StopStrings | None:
    if not stop or model.tokenizer is None:
        return None
    # Where special tokens are part of the text, nothing has to be looked for beside it.
    return StopStrings(stop, () if keep_special else model.tokenizer.pieces.special.values())


def _sampling(proto: pb.GenerateRequest, model: Model, allowed_ids: Int32) -> SamplingParams:
    asked, defaults = proto.sampling, model.defaults
    temperature = asked.temperature if asked.HasField("temperature") else defaults.temperature
    door.check_seed(proto, temperature)
    penalty = asked.repetition_penalty if asked.HasField("repetition_penalty") else defaults.repetition_penalty
    biases = sorted(asked.logit_bias.items())
    min_tokens = proto.stopping.min_tokens
    output = proto.output
    return SamplingParams(
        temperature=temperature + 0.0,  # -0.0 is 0.0
        # At or above the vocabulary it keeps everything: off.
        top_k=_below(asked.top_k if asked.HasField("top_k") else defaults.top_k, model.state.vocab_size),
        top_p=asked.top_p if asked.HasField("top_p") else defaults.top_p,
        min_p=asked.min_p if asked.HasField("min_p") else defaults.min_p,
        seed=asked.seed if asked.HasField("seed") else secrets.randbits(64),
        min_tokens=min_tokens,
        masked_until_min_tokens=pack_int32(sorted(door.ending_ids(proto, model))) if min_tokens else b"",
        repetition_penalty=penalty,
        frequency_penalty=asked.frequency_penalty + 0.0,
        presence_penalty=asked.presence_penalty + 0.0,
        logit_bias_ids=pack_int32([token for token, _ in biases]),
        logit_bias=np.array([bias for _, bias in biases], dtype=LE_FLOAT32).tobytes(),
        allowed_ids=pack_int32(allowed_ids),
        logprobs=output.logprobs if output.HasField("logprobs") else -1,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else -1,
    )


def _below(top_k: int, vocab_size: int) -> int:
    return top_k if top_k < vocab_size else 0


async def checked_ids(field: str, ids: Sequence[int], vocab_size: int, lanes: Lanes) -> Int32:
    """The ids of a message, as many as it may have. Raises Refusal for one that is outside the vocabulary."""
    out = np.empty(len(ids), dtype=LE_INT32)
    async for part in lanes.turns(len(ids)):
        some = ids[part]
        door.check_ids(field, some, vocab_size, part.start)
        out[part] = some
    return out


async def encode(
    proto: pb.GenerateRequest | pb.TokenizeRequest, model: Model, lanes: Lanes, *, bos: bool = True
) -> Int32:
    """The prompt's ids. ``bos``: a text begins as the tokenizer begins one. Raises Refusal."""
    kind = proto.WhichOneof("prompt")
    if kind == "token_ids":
        assert isinstance(proto, pb.GenerateRequest)
        return await checked_ids("token_ids", proto.token_ids.ids, model.state.vocab_size, lanes)
    most = MAX_PIECE_BYTES * model.state.context_length
    if kind == "text":
        size = len(proto.text)
    else:
        size = sum(len(message.role) + len(message.content) for message in proto.chat.messages)
    if size > most:
        raise invalid(kind, f"{size} characters", f"at most {most}: the context is {model.state.context_length} tokens")
    if kind == "text" and size <= SHORT_TEXT:
        ids = _encode_text(proto, model, bos)
    else:
        loop = asyncio.get_running_loop()
        lane = lanes.of(size)
        if kind == "text":
            ids = await loop.run_in_executor(lane, _encode_text, proto, model, bos)
        else:
            ids = await loop.run_in_executor(lane, _encode_chat, proto, model, most)
    highest = int(ids.max(initial=0))
    if highest >= model.state.vocab_size:
        raise Refusal(
            INVALID_ARGUMENT,
            f"{kind}: the tokenizer gives id {highest}, but the model's vocabulary is {model.state.vocab_size}",
            field=kind,
        )
    return ids


def _encode_text(proto: pb.GenerateRequest | pb.TokenizeRequest, model: Model, bos: bool) -> Int32:
    assert model.tokenizer is not None
    return _array(model.tokenizer.encode(proto.text, bos=bos))


def _encode_chat(proto: pb.GenerateRequest | pb.TokenizeRequest, model: Model, most: int) -> Int32:
    assert model.tokenizer is not None
    assert model.template is not None
    messages = [{"role": message.role, "content": message.content} for message in proto.chat.messages]
    try:
        text = model.template.render(messages, most)
    except TemplateFault as fault:
        raise Refusal(INVALID_ARGUMENT, f"chat: the model's template says: {fault}", field="chat") from fault
    # A template writes the BOS token itself where it wants one.
    return _array(model.tokenizer.encode(text, bos=False))


def _array(ids: list[int]) -> Int32:
    """Between two parts the thread can be made to wait for the event loop's."""
    out = np.empty(len(ids), dtype=LE_INT32)
    for start in range(0, len(ids), IDS):
        out[start : start + IDS] = ids[start : start + IDS]
    return out
