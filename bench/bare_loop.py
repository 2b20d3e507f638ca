"""How much of the bare forward's speed is left end to end.

::

    python -m bench.bare_loop --model models/SmolLM2-135M-Instruct.Q4_1.gguf --services --repeats 3

Runs a fixed batch of prompts through the model's forward in a plain loop, in this process; with ``--services``, also
the same prompts at once through both services in processes of their own, in turns with the loop, and prints the ratio
of output throughput (services / bare loop), from the first send to the last token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.load.bare import BareLoop
from bench.load.engines import Stepwire, settle
from bench.load.machine import MachineWatch
from bench.load.processes import stop_on_sigterm
from bench.load.prompts import random_prompts, workload_prompts
from bench.load.record import Request
from executor_svc.malloc import keep_freed_memory
from executor_svc.models.load import load_model


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or Hugging Face folder")
    parser.add_argument("--weights", choices=("float16", "float32", "int8"), default="float16")
    parser.add_argument("--threads", type=int, help="CPU threads of the bare loop (default: all cores)")
    parser.add_argument("--rows", type=int, default=32, help="sequences in the batch, and concurrency of the services")
    parser.add_argument("--input-tokens", type=int, default=128, help="of random prompts")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--workload", type=Path, help="take the prompts from this file's `batch` instead")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--step-tokens", type=int, default=2048, help="new tokens of one prefill forward")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--services", action="store_true", help="measure the services too, and print the ratio")
    parser.add_argument("--executor-flags", default="", help="more flags for executor_svc, in one string")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    stop_on_sigterm()
    keep_freed_memory()  # as the executor does
    with ExitStack() as stack:
        services = None
        if args.services:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bare-loop-")))
            flags = ["--weights", args.weights, *args.executor_flags.split()]
            services = Stepwire(args.model, logs, flags)
            stack.callback(services.stop)
        model = load_model(args.model, weights=args.weights, threads=args.threads).model
        longest = max(len(prompt) for prompt in make_prompts(args, model.facts.vocab_size, 0))
        loop = BareLoop(model, args.rows, longest + args.output_tokens, args.block_size, args.step_tokens)
        loop.run(make_prompts(args, model.facts.vocab_size, 0), 4)  # warm-up
        if services:
            services.wave(make_requests(make_prompts(args, model.facts.vocab_size, 0), 4))
        runs: dict[str, list[dict[str, Any]]] = {"bare": [], "services": []}
        for repeat in range(1, args.repeats + 1):
            prompts = make_prompts(args, model.facts.vocab_size, repeat)
            settle()
            with MachineWatch([]) as watch:
                bare = loop.run(prompts, args.output_tokens)
            runs["bare"].append({"output_throughput": bare.output_throughput, "others": watch.others})
            runs["bare"][-1] |= {"prefill_s": bare.prefill_seconds, "duration_s": bare.seconds}
            if services:
                settle()
                with MachineWatch(services.pids) as watch:
                    result = services.wave(make_requests(prompts, args.output_tokens))
                runs["services"].append(result | {"others": watch.others})
            print_repeat(repeat, runs)
    report = {name: statistics.median(r["output_throughput"] for r in rows) for name, rows in runs.items() if rows}
    if "services" in report:
        report["ratio"] = report["services"] / report["bare"]
    for name, value in report.items():
        print(f"{name:<10}{value:>10.3f}" + ("" if name == "ratio" else " output tokens/s (median)"))
    if args.json:
        args.json.write_text(json.dumps({"medians": report, "runs": runs}, indent=1, default=str))
    return 0


def make_prompts(args: argparse.Namespace, vocab_size: int, repeat: int) -> list[list[int]]:
    """New prompts each repeat, so that no prefix cache answers from an earlier one."""
    if args.workload:
        return workload_prompts(args.workload, "batch", args.rows, repeat)
    return random_prompts(args.rows, args.input_tokens, vocab_size, seed=repeat)


def make_requests(prompts: list[list[int]], output_tokens: int) -> list[Request]:
    return [Request(i, prompt, output_tokens) for i, prompt in enumerate(prompts)]


def print_repeat(repeat: int, runs: dict[str, list[dict[str, Any]]]) -> None:
    parts = [
        f"{name} {rows[-1]['output_throughput']:.1f} tok/s in {rows[-1]['duration_s']:.2f} s, "
        f"others {rows[-1]['others']:.1%}" + (f", failed {rows[-1]['failures']}" if rows[-1].get("failures") else "")
        for name, rows in runs.items()
        if rows
    ]
    print(f"# {repeat}: " + "; ".join(parts), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
