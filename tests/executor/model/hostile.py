"""Damaged checkpoints in a process whose memory has a limit: ``python -m ... FOLDER GGUF SEED COUNT [load]``.

Each of COUNT seeded mutations of the folder's files and of the GGUF file must end in a ``CheckpointError`` or in a
checkpoint that can be read to its end; with ``load`` in a model that is ready to run. Prints one JSON line of what came
of them; anything else ends the process with a traceback.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from executor_svc.models.load import load_model
from executor_svc.weights.checkpoint import open_checkpoint
from executor_svc.weights.errors import CheckpointError

MEMORY = 640 << 20  # bytes of address space that a hostile file may make us ask for
_EXTREMES = (0, 1, 2, 127, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 2**31, 2**63, 1e308, -0.5, "", "x", "\u0000", "../../etc/passwd", [], [None], {}, {"a": 1},
)  # fmt: skip


def limit_memory(extra: int) -> None:
    """At most ``extra`` bytes of address space more than now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, size + extra))


def mutated_bytes(data: bytes, head: int, rng: random.Random) -> bytes:
    """``head``: most changes are made to so many first bytes."""
    raw = bytearray(data)

    def position() -> int:
        return rng.randrange(min(len(raw), head) if rng.random() < 0.9 else len(raw))

    match rng.randrange(6):
        case 0:
            return bytes(raw[: rng.randrange(len(raw))])
        case 1:
            for _ in range(rng.randint(1, 4)):
                raw[position()] = rng.randrange(256)
        case 2:
            at = position()
            raw[at : at + 8] = struct.pack("<Q", rng.choice(_EXTREMES))
        case 3:
            at = position()
            raw[at : at + 4] = struct.pack("<I", rng.choice(_EXTREMES) & 0xFFFFFFFF)
        case 4:
            at, length = position(), rng.randint(1, 200)
            raw[at:at] = raw[at : at + length]
        case _:
            at = position()
            del raw[at : at + rng.randint(1, 200)]
    return bytes(raw)


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutated_bytes(data, len(data), rng)
    value = json.loads(data)
    node, depth = value, 0
    while depth < 3 and isinstance(node, dict | list) and node:
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        child = node[key]
        if isinstance(child, dict | list) and child and rng.random() < 0.7:
            node, depth = child, depth + 1
            continue
        if rng.random() < 0.2:
            del node[key]
        else:
            node[key] = rng.choice(_VALUES)
        break
    text = json.dumps(value)
    if rng.random() < 0.05:
        text = text[:-1] + ', "deep": ' + "[" * 100_000 + "]" * 100_000 + "}"
    return text.encode()


def outcome(path: Path, load: bool) -> str:
    try:
        if load:
            load_model(path, weights="float32", attention="torch", threads=1)
        else:
            for _ in open_checkpoint(path).tensors():
                pass
    except CheckpointError:
        return "refused"
    return "loaded"


def main() -> None:
    folder, gguf, seed, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    load = sys.argv[5:] == ["load"]
    torch.set_num_threads(1)
    for path in (folder, gguf):
        assert outcome(path, True) == "loaded", path  # and all that loads on first use is there before the limit
    limit_memory(MEMORY)
    rng = random.Random(seed)
    work = folder.parent / "mutated"
    shutil.copytree(folder, work)
    originals = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    whole = gguf.read_bytes()
    damaged = folder.parent / "mutated.gguf"
    seen: Counter[str] = Counter()
    slowest = 0.0
    for number in range(count):
        what = rng.choice(["gguf", "gguf", *originals])
        if what == "gguf":
            damaged.write_bytes(mutated_bytes(whole, 16_000, rng))
            path = damaged
        else:
            mutate: Callable[..., bytes] = mutated_json
            original = originals[what]
            if what.endswith(".safetensors"):
                original = mutated_bytes(original, 8 + struct.unpack("<Q", original[:8])[0], rng)
            elif what.endswith(".json"):
                original = mutate(original, rng)
            else:
                original = mutated_bytes(original, len(original), rng)
            (work / what).write_bytes(original)
            path = work
        started = time.process_time()
        try:
            seen[f"{what} {outcome(path, load)}"] += 1
        except BaseException:
            print(f"mutation {number} of seed {seed}: {what}", file=sys.stderr)
            raise
        slowest = max(slowest, time.process_time() - started)
        if what != "gguf":
            (work / what).write_bytes(originals[what])
    print(json.dumps({"seen": seen, "slowest": slowest}))


if __name__ == "__main__":
    main()
