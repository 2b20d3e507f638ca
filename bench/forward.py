"""Time of one forward on the CPU: decode steps by batch size, and prefill by prompt length.

usage: python -m bench.forward MODEL [--weights float16|float32|int8] [--attention numba|torch] [--threads N]
                                     [--context 256] [--seconds 1.0] [--json FILE]

MODEL is a .gguf file or a Hugging Face folder. Times are the fastest and the median of repeated steps. For the compiled
forward the split into linears, head, attention and rest comes from the time stamps that its phases leave. The KV cache
is full of numbers like those of a model: pages that were never written are one page of zeros to the kernel, and reading
them costs nearly nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch

from executor_svc.metadata import StepMetadata
from executor_svc.models.load import load_model

BLOCK = 16


def make_step(rows: int, context: int, new: int, vocab: int) -> tuple[torch.Tensor, StepMetadata]:
    """``rows`` sequences with ``context`` tokens cached and ``new`` tokens to run; each one's last logits wanted."""
    blocks = -(-(context + new) // BLOCK)
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    positions = np.tile(np.arange(context, context + new, dtype=np.int64), rows)
    of_row = np.repeat(np.arange(rows), new)
    ids = np.random.default_rng(0).integers(0, vocab, rows * new)
    starts = np.arange(rows + 1, dtype=np.int32) * new
    metadata = StepMetadata(
        input_ids=ids,
        positions=positions,
        slots=np.arange(rows, dtype=np.int32),
        seq_lens=np.full(rows, context, np.int32),
        query_lens=np.full(rows, new, np.int32),
        query_starts=starts,
        block_tables=tables,
        kv_slots=tables[of_row, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
        logit_indices=starts[1:].astype(np.int64) - 1,
        logit_rows=np.arange(rows, dtype=np.int32),
        num_decode_rows=rows if new == 1 else 0,
    )
    return torch.from_numpy(ids), metadata


def measure(model: Any, rows: int, context: int, new: int, seconds: float) -> dict[str, Any]:
    ids, metadata = make_step(rows, context, new, model.facts.vocab_size)
    for _ in range(2):
        model.forward(ids, metadata)
    times: list[float] = []
    shares: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        model.forward(ids, metadata)
        times.append(time.perf_counter() - start)
        if hasattr(model, "phase_shares"):
            shares.append(model.phase_shares())
    best, median = min(times), float(np.median(times))
    out: dict[str, Any] = {
        "rows": rows, "context": context, "new": new, "best_ms": best * 1e3, "median_ms": median * 1e3,
        "tokens_per_s": rows * new / median, "steps": len(times),
    }  # fmt: skip
    if shares:
        fastest = shares[int(np.argmin(times))]
        named = {name: fastest[name] * best * 1e3 for name in ("linear", "head", "attention")}
        out["split_ms"] = named | {"rest": best * 1e3 - sum(named.values())}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of one forward on the CPU.")
    parser.add_argument("model")
    parser.add_argument("--weights", default="float16")
    parser.add_argument("--attention")
    parser.add_argument("--kv-type", choices=("float16", "float32"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    start = time.perf_counter()
    loaded = load_model(
        arguments.model,
        weights=arguments.weights,
        threads=arguments.threads,
        attention=arguments.attention,
        kv_type=arguments.kv_type,
    )
    model: Any = loaded.model
    print(f"{model.facts.name}, {arguments.weights}: loaded in {time.perf_counter() - start:.1f} s")
    model.allocate_kv_cache(max(64 * -(-(arguments.context + 1) // BLOCK), 64), BLOCK)
    for tensor in model.kv_tensors():
        tensor.normal_(generator=torch.Generator().manual_seed(0))
    results = []
    print("      rows context  new   best ms  median ms   tok/s   linear  head  attention  rest (ms, of the best)")
    for kind, rows, context, new in [
        *(("decode", rows, arguments.context, 1) for rows in (1, 8, 32, 64)),
        *(("prefill", 1, 0, new) for new in (128, 512, 1024)),
    ]:
        result = measure(model, rows, context, new, arguments.seconds)
        results.append({"kind": kind} | result)
        split = "  ".join(f"{value:7.2f}" for value in result.get("split_ms", {}).values())
        print(
            f"{kind:8}{rows:3} {context:6} {new:5} {result['best_ms']:9.2f} {result['median_ms']:9.2f} "
            f"{result['tokens_per_s']:9.1f}  {split}"
        )
    if arguments.json:
        facts = {"model": model.facts.name, "weights": arguments.weights, "attention": arguments.attention}
        with open(arguments.json, "w") as file:
            json.dump(facts | {"threads": torch.get_num_threads(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
