"""Time of one step's sampling on the CPU: alike rows, and what a row that asks for much costs those that do not.

    python -m bench.sampling [--vocab 49152] [--rows 1,32,256] [--repeat 30] [--json FILE]

Every batch is of one kind, besides the mixed ones: in ``1 in 16`` a sixteenth of the rows is of the kind
``everything``, the others are plain: they take their argmax, or draw at temperature 1. Microseconds of the calling
thread's processor time (the sampler has no other), so that a busy machine changes little, of one call of
``executor_svc.sampling.sampler.sample``: the median and the fastest of repeated calls. For mixed batches also what is
left for one plain row when what the special ones cost alone is taken away, beside what it costs among its like.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from executor_svc.malloc import keep_freed_memory
from executor_svc.sampling.logprobs import row_logprobs
from executor_svc.sampling.rows import SampleRows, SlotParams
from executor_svc.sampling.rules import parse_rules
from executor_svc.sampling.sampler import sample, warm_up
from executor_svc.sequence import Sequence
from protos.step import Admission, SamplingParams
from protos.wire import pack_int32

PROMPT, OUTPUTS = 512, 512  # tokens of each row's history: what penalties look at
BIASED = 100  # ids with a bias, and ids that min_tokens masks


def kinds(vocab: int) -> dict[str, SamplingParams]:
    rng = np.random.default_rng(1)
    ids = pack_int32(rng.choice(vocab, min(BIASED, vocab), replace=False))
    bias = np.linspace(-5, 5, len(ids) // 4, dtype="<f4").tobytes()
    penalties: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3}
    biased: dict[str, Any] = {"logit_bias_ids": ids, "logit_bias": bias}
    masked: dict[str, Any] = {"min_tokens": 2**30, "masked_until_min_tokens": ids}
    filters: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
    allowed = pack_int32(rng.choice(vocab, vocab // 2, replace=False))
    return {
        "greedy": SamplingParams(temperature=0.0),
        "draw": SamplingParams(),
        "top_k": SamplingParams(top_k=50),
        "top_p": SamplingParams(top_p=0.95),
        "filters": SamplingParams(**filters),
        "penalties": SamplingParams(temperature=0.0, **penalties),
        "bias": SamplingParams(temperature=0.0, **biased),
        "min_tokens": SamplingParams(temperature=0.0, **masked),
        "allowed_ids": SamplingParams(temperature=0.0, allowed_ids=allowed),
        "logprobs 0": SamplingParams(temperature=0.0, logprobs=0),
        "logprobs 20": SamplingParams(temperature=0.0, logprobs=20),
        "everything": SamplingParams(logprobs=20, **filters, **penalties, **biased, **masked),
    }


def make_rows(params: list[SamplingParams], vocab: int) -> SampleRows:
    count = len(params)
    rng = np.random.default_rng(2)
    table = SlotParams(count)
    special = []
    for slot, asked in enumerate(params):
        prompt = rng.integers(0, vocab, PROMPT).astype(np.int32)
        outputs = rng.integers(0, vocab, OUTPUTS).astype(np.int32)
        rules = parse_rules(asked, prompt, outputs, vocab)
        sequence = Sequence(slot, 1, "r", PROMPT, prompt, rules, None)
        table.admit(Admission(slot, 1, "r", 0, b"", b"", 0, b"", asked), sequence)
        if rules is not None:
            special.append((slot, sequence))
    slots = np.arange(count, dtype=np.int32)
    return SampleRows(
        slots=slots,
        generations=np.ones(count, dtype=np.int32),
        positions=np.full(count, PROMPT + OUTPUTS, dtype=np.int64),
        outputs=np.full(count, OUTPUTS, dtype=np.int64),
        draws=table.draws_of(slots),
        special=tuple(special),
    )


def measure(params: list[SamplingParams], logits: np.ndarray, repeat: int) -> dict[str, float]:
    """Microseconds of one step: median and fastest."""
    rows = make_rows(params, logits.shape[1])
    times = []
    for _ in range(repeat):
        fresh = logits[: len(params)].copy()  # rules change it in place
        started = time.thread_time_ns()
        output = sample(fresh, rows)
        times.append((time.thread_time_ns() - started) / 1e3)
        assert output.ok.all()
    return {"median_us": statistics.median(times), "best_us": min(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rows", default="1,32,256", help="numbers of rows, comma-separated")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    warm_up(args.vocab)
    sizes = [int(text) for text in args.rows.split(",")]
    # Logits as models have them: few near the top, the rest far below.
    logits = np.random.default_rng(0).normal(0, 2.5, (max(sizes), args.vocab)).astype(np.float32)
    results: list[dict[str, Any]] = []

    def show(rows: int, batch: str, times: dict[str, float], **more: float) -> None:
        results.append({"rows": rows, "batch": batch, **times, **more})
        extra = "".join(f"   {name.replace('_', ' ')} {value:.1f}" for name, value in more.items())
        per_row = times["median_us"] / rows
        print(f"{rows:<6}{batch:<28}{times['median_us']:>12.0f}{times['best_us']:>12.0f}{per_row:>12.1f}{extra}")

    print(f"{'rows':<6}{'batch':<28}{'median us':>12}{'best us':>12}{'us a row':>12}   vocabulary {args.vocab}")
    by_kind = kinds(args.vocab)
    for count in sizes:
        alone = {name: measure([params] * count, logits, args.repeat) for name, params in by_kind.items()}
        for name, times in alone.items():
            show(count, name, times)
        few = max(1, count // 16)
        if count <= few:
            continue
        special = measure([by_kind["everything"]] * few, logits, args.repeat)
        for name in ("greedy", "draw"):
            batch = [by_kind["everything"] if i % 16 == 0 and i < 16 * few else by_kind[name] for i in range(count)]
            times = measure(batch, logits, args.repeat)
            left = (times["median_us"] - special["median_us"]) / (count - few)
            among = alone[name]["median_us"] / count
            show(count, f"{name}, everything 1 in 16", times, plain_row_us=left, alone_us=among)
    prompt = []
    for _ in range(args.repeat):
        started = time.thread_time_ns()
        row_logprobs(logits[0], 5, 20, 1)
        prompt.append((time.thread_time_ns() - started) / 1e3)
    print(f"logprobs of one prompt position, top 20: {statistics.median(prompt):.0f} us (fastest {min(prompt):.0f})")
    if args.json:
        position = {"median_us": statistics.median(prompt), "best_us": min(prompt)}
        facts = {"vocab": args.vocab, "repeat": args.repeat, "prompt_position": position}
        args.json.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
