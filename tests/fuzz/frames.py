"""Hostile frames for both ZeroMQ sockets of the core: what is kept in ``corpus.json``, and seeded mutations of it.

The corpus holds one frame of every message of the contracts (made by ``python -m tests.fuzz.frames``) and, by hand,
every frame that once did harm.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec

from protos import front, step
from protos.wire import Epoch, pack_int32

CORPUS = Path(__file__).with_name("corpus.json")
_SHA = "a" * 64
_encode = msgspec.msgpack.Encoder().encode


def load(kind: str) -> list[bytes]:
    """``step``: to the executors' socket; ``front``: to the workers'; ``grpc``: request bytes."""
    return [bytes.fromhex(text) for text in json.loads(CORPUS.read_text())[kind]]


def hostile_hello(name: str = "hostile", **changes: object) -> step.Hello:
    """Valid in form; the numbers of its model are as large as the contract lets them be."""
    card = step.ModelCard("hostile", "x", _SHA, _SHA, 2**24, 2**24, (0, 2**24 - 1), ())
    limits = step.Limits(4096, 1024, 65536, 2**20, 64)
    hello = step.Hello((1,), name, 2**64 - 1, card, limits, "d" * 4096)
    return msgspec.structs.replace(hello, **changes)


def messages() -> dict[str, list[object]]:
    epoch = Epoch(1, 1)
    return {
        "step": [
            hostile_hello(),
            hostile_hello("other", versions=(99,)),
            step.StepResult(epoch, 1, 0, pack_int32([0]), b"\1\0", pack_int32([2**31 - 1])),
            step.StepResult(
                epoch, 1, 0, faults=(step.RowFault(2**31 - 1, 0, 1, "x" * 4096),),
                logprobs=(step.SlotLogprobs(2**31 - 1, 0, (step.RowLogprobs(0, -1.0, 1, b"abc", b"x"),)),),
            ),
            step.EpochLost(epoch, 2**31 - 1, 2**31 - 1, "?"),
            step.Prepared("g"),
            step.Failed("g", "why"),
            step.AssetChunk(_SHA, 2**31 - 1, b"x" * 1000),
            step.Load(2**31 - 1, 0, 2**64 - 1, 0),
            step.Draining(),
            step.Goodbye("bye"),
        ],
        "front": [
            front.Attach(front.FRONT_VERSION, "evil", 2**64 - 1, 2**31 - 1),
            front.Attach(99, "evil", 0),
            front.Submit(
                stream=2**31 - 1, request_id="r", model="m", prompt=pack_int32([1, 2, 3]),
                choices=(front.Choice(0), front.Choice(2**31 - 1, b"odd")), sampling=step.SamplingParams(),
                max_tokens=2**31 - 1, arrival=1e308, deadline=-1e308, block_hashes=b"short", tenant="t" * 4096,
            ),
            front.Submit(
                stream=0, request_id="r", model="m", prompt=b"", choices=(front.Choice(0),),
                sampling=step.SamplingParams(logit_bias_ids=b"xyz", logit_bias=b"a", allowed_ids=b"\1"), max_tokens=0,
                arrival=float("nan"), continuation=True,
            ),
            front.Stop(0, 0, 2**31 - 1),
            front.Seen(b"abc", b"", pack_int32([1])),
            front.Seen(pack_int32([-1]), pack_int32([-1]), pack_int32([-1])),
            front.Cancel(2**31 - 1),
            front.Credit(2**64 - 1),
            front.FetchAsset(_SHA, 2**31 - 1, 1),
            front.GetStatus(1, "x" * 4096, True),
            front.Control(1, "flush", ""),
            front.Control(1, "explode", "x"),
            front.Detach("evil", 0),
        ],
    }  # fmt: skip


def mutated(rng: random.Random, corpus: list[bytes]) -> bytes:
    """One frame near a valid one, or far from any."""
    data = bytearray(rng.choice(corpus) or b"\0")
    match rng.randrange(7):
        case 0:
            return rng.randbytes(rng.choice([0, 1, 2, 9, 100, 5000]))
        case 1:
            return bytes(data[: rng.randrange(len(data) + 1)])
        case 2:  # two halves
            other = rng.choice(corpus)
            return bytes(data[: rng.randrange(len(data) + 1)]) + other[rng.randrange(len(other) + 1) :]
        case 3:  # a field of another type
            at = rng.randrange(len(data) + 1)
            value = rng.choice([None, -1, 2**64 - 1, 1e400, "x" * 300, b"y" * 300, [[]] * 20, {"a": 1}])
            return bytes(data[:at]) + _encode(value) + bytes(data[at + 1 :])
        case 4:  # more fields than there are
            return bytes(data) + bytes(data)
        case _:
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)


def main() -> None:
    """Adds a frame of each message to the corpus; takes none out."""
    corpus = json.loads(CORPUS.read_text()) if CORPUS.exists() else {"step": [], "front": [], "grpc": []}
    for kind, valid in messages().items():
        frames = [_encode(message).hex() for message in valid]
        corpus[kind] += [frame for frame in frames if frame not in corpus[kind]]
    CORPUS.write_text(json.dumps(corpus, indent=0) + "\n")


if __name__ == "__main__":
    main()
