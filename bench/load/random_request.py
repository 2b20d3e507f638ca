"""One random request of the campaign: what is sent, how it is disturbed, and how it may end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protos.stepwire.v1 import inference_pb2 as pb

VOCAB = 384
EOS = 2
_WORDS = ["the", "quick", "fox", "caf\u00e9", "\u4f60\u597d", "\U0001f600", "<|im_end|>", "12", "{}", "\n", "a" * 40]

# How a valid request may end whatever the load: whole, or refused because somebody (or its tenant) has too much.
_FAIR = frozenset({"OK", "RESOURCE_EXHAUSTED"})
_INVALID = frozenset({"INVALID_ARGUMENT"})


@dataclass(slots=True)
class Case:
    kind: str
    method: str
    data: bytes
    expected: frozenset[str]
    request: Any = None  # the message of `data`; None: no message at all
    banned: set[int] = field(default_factory=set)
    deadline: float = 0.0  # seconds; 0: none of its own
    cancel_after: float | None = None  # seconds
    cancel_at_message: int = 0


def draw(rng: random.Random) -> Case:
    kind = rng.choices(["generate", "invalid", "bytes", "text"], [66, 20, 6, 8])[0]
    if kind == "bytes":
        return _bytes(rng)
    if kind == "text":
        return _text(rng)
    request, banned = _generate(rng)
    method = rng.choice(["Generate", "GenerateStream", "GenerateStream"])
    if kind == "invalid":
        name = rng.choice(sorted(_BREAKS))
        _BREAKS[name](request)
        expected = frozenset({"NOT_FOUND"}) if name == "model" else _INVALID
        return Case(f"invalid {name}", method, request.SerializeToString(), expected, request)
    case = Case("generate", method, request.SerializeToString(), _FAIR, request, banned)
    fate = rng.random()
    if fate < 0.2:
        case.cancel_after = rng.expovariate(10.0)
    elif fate < 0.3 and method == "GenerateStream":
        case.cancel_at_message = rng.randint(1, 6)
    elif fate < 0.4:
        case.deadline = rng.uniform(0.001, 0.5)
        case.expected = _FAIR | {"DEADLINE_EXCEEDED"}
    if case.cancel_after is not None or case.cancel_at_message:
        case.kind, case.expected = "cancelled", _FAIR | {"CANCELLED"}
    elif case.deadline:
        case.kind = "deadline"
    return case


def _ids(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high))]


def _sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, words)))


def _generate(rng: random.Random) -> tuple[pb.GenerateRequest, set[int]]:
    """A valid request, and the ids that it bans."""
    request = pb.GenerateRequest(tenant=rng.choice(["", "big", "small", "metered"]), priority=rng.randint(-100, 100))
    match rng.randrange(4):
        case 0:
            request.text = _sentence(rng, 20)
        case 1:
            request.chat.messages.add(role="user", content=_sentence(rng, 20))
        case 2:  # a prefix that many share
            shared = random.Random(rng.randrange(4))
            request.token_ids.ids.extend(_ids(shared, 64, 128) + _ids(rng, 1, 40))
        case _:
            request.token_ids.ids.extend(_ids(rng, 1, 200))

    def maybe(chance: float = 0.3) -> bool:
        return rng.random() < chance

    sampling, stopping, output = request.sampling, request.stopping, request.output
    stopping.max_tokens = rng.choice([1, 2, 5, 16, 40, 160])
    if maybe(0.7):
        sampling.temperature = rng.choice([0.0, 1e-6, 0.5, 1.0, 100.0])
    if maybe():
        sampling.top_p = rng.choice([1e-9, 0.5, 0.999999999, 1.0])
    if maybe():
        sampling.top_k = rng.choice([0, 1, 7, VOCAB, 2**31])
    if maybe():
        sampling.min_p = rng.choice([0.0, 0.1, 1.0])
    if maybe():
        sampling.seed = rng.randrange(2**64)
    if maybe():
        sampling.n = rng.choice([1, 2, 3])
    if maybe():
        sampling.repetition_penalty = rng.choice([0.01, 1.3, 1000.0])
    if maybe():
        sampling.frequency_penalty = rng.uniform(-100.0, 100.0)
    if maybe():
        sampling.presence_penalty = rng.uniform(-100.0, 100.0)
    banned: set[int] = set()
    if maybe():
        banned = set(_ids(rng, 0, 6))
        for token in banned:
            sampling.logit_bias[token] = -math.inf
        for token in set(_ids(rng, 0, 6)) - banned:
            sampling.logit_bias[token] = rng.uniform(-100.0, 100.0)
    if maybe(0.15):
        allowed = set(_ids(rng, 1, 12)) - banned
        sampling.allowed_token_ids.extend(sorted(allowed))
    if maybe(0.2) and not sampling.allowed_token_ids:
        stopping.min_tokens = rng.randint(0, stopping.max_tokens)
    if maybe(0.2) and not sampling.allowed_token_ids:
        stopping.stop_token_ids.extend(_ids(rng, 1, 4))
    if maybe(0.25):
        stopping.stop.extend(rng.sample(["a", "e ", "\u00e9", "<|im_end|>", "zz", "qu"], rng.randint(1, 3)))
    stopping.ignore_eos, stopping.include_stop = maybe(), maybe()
    if maybe(0.25):
        output.logprobs = rng.choice([0, 1, 20])
    if maybe(0.1):
        output.prompt_logprobs = rng.choice([0, 2])
    output.prompt_token_ids = maybe(0.1)
    if maybe(0.2):
        output.skip_special_tokens = maybe(0.5)
    request.bypass_prefix_cache = maybe(0.1)
    return request, banned


def _text(rng: random.Random) -> Case:
    if rng.random() < 0.5:
        request: Any = pb.TokenizeRequest(text=_sentence(rng, 60), pieces=rng.random() < 0.5)
        return Case("tokenize", "Tokenize", request.SerializeToString(), frozenset({"OK"}), request)
    request = pb.DetokenizeRequest(ids=_ids(rng, 0, 80))
    return Case("detokenize", "Detokenize", request.SerializeToString(), frozenset({"OK"}), request)


def _bytes(rng: random.Random) -> Case:
    """Random bytes, or a message with some of its bytes changed: whatever it means by accident, it ends once."""
    method = rng.choice(["Generate", "GenerateStream", "Tokenize", "Detokenize"])
    if rng.random() < 0.5:
        data = rng.randbytes(rng.choice([0, 1, 7, 100, 4096]))
    else:
        request, _ = _generate(rng)
        changed = bytearray(request.SerializeToString())
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        data = bytes(changed)
    return Case("bytes", method, data, _FAIR | _INVALID | {"NOT_FOUND", "DEADLINE_EXCEEDED"}, deadline=30.0)


_BREAKS: dict[str, Callable[[pb.GenerateRequest], Any]] = {
    "temperature": lambda r: setattr(r.sampling, "temperature", math.nan),
    "top_p": lambda r: setattr(r.sampling, "top_p", 0.0),
    "min_p": lambda r: setattr(r.sampling, "min_p", 1.5),
    "n": lambda r: setattr(r.sampling, "n", 17),
    "repetition_penalty": lambda r: setattr(r.sampling, "repetition_penalty", 0.0),
    "frequency_penalty": lambda r: setattr(r.sampling, "frequency_penalty", math.inf),
    "presence_penalty": lambda r: setattr(r.sampling, "presence_penalty", -200.0),
    "logit_bias": lambda r: r.sampling.logit_bias.update({VOCAB: 1.0}),
    "allowed_token_ids": lambda r: r.sampling.allowed_token_ids.extend([5, 5]),
    "max_tokens": lambda r: setattr(r.stopping, "max_tokens", 0),
    "min_tokens": lambda r: setattr(r.stopping, "min_tokens", 10_000),
    "stop": lambda r: r.stopping.stop.append(""),
    "stop_token_ids": lambda r: r.stopping.stop_token_ids.append(2**32 - 1),
    "logprobs": lambda r: setattr(r.output, "logprobs", 21),
    "prompt": lambda r: r.ClearField(r.WhichOneof("prompt")),
    "too long": lambda r: r.token_ids.ids.extend([7] * 5000),
    "priority": lambda r: setattr(r, "priority", 101),
    "request_id": lambda r: setattr(r, "request_id", "x" * 129),
    "continue_from": lambda r: r.continue_from.add(index=99),
    "model": lambda r: setattr(r, "model", "nobody"),
}
