"""Streams of all kinds, each through our own client, and everything a client sees of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from protos.stepwire.v1 import inference_pb2 as pb
from stepwire import AsyncClient, AsyncStream, Chunk, RequestError
from stepwire.generation import Generation

KINDS = ("greedy", "seeded", "choices", "stop", "text", "long", "penalties", "logprobs")
RETRY_FOR = 300.0  # seconds without a message: a loaded machine takes its time to start processes
_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "0123",
    "Größe",
    "naïve",
    "東京",
    "привет",
)


@dataclass(slots=True)
class Outcome:
    """What one client saw of one stream. Times are monotonic seconds."""

    kind: str
    ids: list[list[int]] = field(default_factory=list)  # by choice
    texts: list[str] = field(default_factory=list)
    ends: list[tuple[str, int | str | None] | None] = field(default_factory=list)
    num_ends: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # (id, logprob) of every id
    prompt_tokens: int = 0
    completion_tokens: int = -1  # as the server counted them
    continuations: int = 0
    error: str = ""
    began: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of every message with tokens

    def feed(self, chunk: Chunk) -> None:
        while len(self.ids) <= chunk.index:
            self.ids.append([])
            self.texts.append("")
            self.ends.append(None)
            self.num_ends.append(0)
            self.logprobs.append([])
        self.ids[chunk.index] += chunk.token_ids
        self.texts[chunk.index] += chunk.text
        self.logprobs[chunk.index] += [(entry.token_id, entry.logprob) for entry in chunk.logprobs]
        if chunk.finish is not None:
            self.num_ends[chunk.index] += 1
            self.ends[chunk.index] = (chunk.finish.reason, chunk.finish.matched)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def make_requests(count: int, output: int, vocab_size: int, context: int, seed: int) -> list[pb.GenerateRequest]:
    """``count`` requests of the kinds in turn; those of kind ``stop`` still want their stop string (`with_stop`)."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        tokens = rng.randrange(output // 2, output + 1)
        greedy = kind == "greedy" or rng.random() < 0.2
        request = pb.GenerateRequest(
            request_id=f"chaos-{seed}-{i}",
            sampling=pb.Sampling(
                temperature=0.0 if greedy else 0.9,
                top_p=1.0 if greedy else 0.95,
                seed=rng.getrandbits(63),
                n=rng.choice((2, 3)) if kind == "choices" else 1,
            ),
            stopping=pb.Stopping(max_tokens=tokens, ignore_eos=kind != "text"),
        )
        if kind == "penalties":
            request.sampling.repetition_penalty = 1.2
            request.sampling.frequency_penalty = 0.3
            request.sampling.presence_penalty = 0.2
            request.sampling.logit_bias[rng.randrange(3, vocab_size)] = 2.0
            request.stopping.min_tokens = tokens // 2
        if kind == "logprobs":
            request.output.logprobs = rng.choice((0, 3))
            request.output.prompt_logprobs = 1
        if kind == "text":
            request.text = " ".join(rng.choices(_WORDS, k=rng.randrange(4, 30)))
        else:
            length = rng.randrange(200, 400) if kind == "long" else rng.randrange(4, 80)
            length = min(length, context - tokens - 1)
            request.token_ids.ids.extend(rng.randrange(3, vocab_size) for _ in range(length))
        out.append(request)
    return out


def kind_of(index: int) -> str:
    return KINDS[index % len(KINDS)]


def with_stop(request: pb.GenerateRequest, text: str) -> pb.GenerateRequest:
    """``request``, whose undisturbed text is ``text``, ended by three characters from its later half."""
    out = pb.GenerateRequest()
    out.CopyFrom(request)
    at = len(text) * 2 // 3
    out.stopping.stop.append(text[at : at + 3] or "x")
    return out


async def run_one(
    client: AsyncClient, index: int, request: pb.GenerateRequest, addresses: int, on_tokens: Callable[[int], None]
) -> Outcome:
    """To its end, whatever it is. ``on_tokens`` hears of every token as it comes."""
    outcome = Outcome(kind_of(index), began=time.monotonic())
    stream = AsyncStream(client, Generation(request, retry_for=RETRY_FOR, addresses=addresses))
    try:
        async for chunk in stream:
            outcome.feed(chunk)
            if chunk.token_ids:
                outcome.arrivals.append(time.monotonic())
                on_tokens(len(chunk.token_ids))
    except RequestError as error:
        outcome.error = str(error)
    except grpc.RpcError as error:
        outcome.error = repr(error)
    outcome.continuations = stream.continuations
    if stream.usage is not None:
        outcome.prompt_tokens = stream.usage.prompt_tokens
        outcome.completion_tokens = stream.usage.completion_tokens
    return outcome


async def run_all(
    clients: Sequence[AsyncClient],
    requests: Sequence[pb.GenerateRequest],
    concurrency: int,
    addresses: int,
    on_tokens: Callable[[int], None] = lambda count: None,
    gate: Callable[[], Awaitable[None]] | None = None,
) -> list[Outcome]:
    """All of them, ``concurrency`` at a time, over the clients in turn; each passes the ``gate`` first."""
    turn = asyncio.Semaphore(concurrency)

    async def limited(index: int, request: pb.GenerateRequest) -> Outcome:
        async with turn:
            if gate is not None:
                await gate()
            return await run_one(clients[index % len(clients)], index, request, addresses, on_tokens)

    return list(await asyncio.gather(*(limited(i, request) for i, request in enumerate(requests))))
