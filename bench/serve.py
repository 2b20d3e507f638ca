"""Load generator over gRPC.

::

    python -m bench.serve --address 127.0.0.1:50051 --concurrency 32 --num-requests 128 --ignore-eos --json out.json
    python -m bench.serve --request-rate 4 --prompt shared-prefix --input-tokens 512 --prefix-tokens 448
    python -m bench.serve --prompt workload --workload FILE --workload-case batch --concurrency 32 --num-requests 32

Prints TTFT, TPOT, ITL, E2EL (mean, median, p99), throughput, failures by status, and the generator's own lag: where
its loop lag is not small beside ITL, or its CPU share nears 1, use ``--processes``.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.load.figures import table
from bench.load.grpc_driver import GrpcDriver, find_model
from bench.load.prompts import CASES, poisson_times, random_prompts, shared_prefix_prompts, workload_prompts
from bench.load.record import Request
from bench.load.shards import Shard, run_load


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--model", default="", help="may be left out where one model is served")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=int, help="requests in flight (default 1)")
    pace.add_argument("--request-rate", type=float, help="requests a second, Poisson arrivals")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--prompt", choices=("random", "shared-prefix", "workload"), default="random")
    parser.add_argument("--input-tokens", type=int, default=128, help="prompt length (not for --prompt workload)")
    parser.add_argument("--prefix-tokens", type=int, help="shared-prefix: of --input-tokens (default three quarters)")
    parser.add_argument("--num-prefixes", type=int, default=1, help="shared-prefix: different prefixes")
    parser.add_argument("--workload", type=Path, help="JSON: token ids under single, batch, prefill, prefixes, suffix")
    parser.add_argument("--workload-case", choices=CASES, default="batch")
    parser.add_argument("--repeat", type=int, default=0, help="workload: another number, prompts new to a cache")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=4, help="requests sent before, not counted")
    parser.add_argument("--processes", type=int, default=1, help="generator processes")
    parser.add_argument("--timeout", type=float, default=600.0, help="deadline of each request, seconds")
    parser.add_argument("--json", type=Path, help="write figures, arguments and a line for each request here")
    args = parser.parse_args(argv)
    if (args.prompt == "workload") != (args.workload is not None):
        parser.error("--prompt workload and --workload FILE go together")
    if args.prefix_tokens is not None and args.prompt != "shared-prefix":
        parser.error("--prefix-tokens is for --prompt shared-prefix")
    for name in ("num_requests", "input_tokens", "output_tokens", "num_prefixes", "processes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.concurrency is not None and args.concurrency < 1:
        parser.error("--concurrency must be at least 1")
    if args.request_rate is not None and args.request_rate <= 0:
        parser.error("--request-rate must be above 0")
    return args


def make_requests(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    count = args.num_requests
    if args.prompt == "random":
        prompts = random_prompts(count, args.input_tokens, vocab_size, args.seed)
    elif args.prompt == "shared-prefix":
        prefix = args.prefix_tokens or args.input_tokens * 3 // 4
        prompts = shared_prefix_prompts(count, args.input_tokens, prefix, args.num_prefixes, vocab_size, args.seed)
    else:
        prompts = workload_prompts(args.workload, args.workload_case, count, args.repeat)
    times = poisson_times(count, args.request_rate, args.seed) if args.request_rate else [0.0] * count
    return [_request(args, i, prompt, at) for i, (prompt, at) in enumerate(zip(prompts, times, strict=True))]


def warmup_requests(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Prompts of their own, so that they leave nothing in a prefix cache that the load could find."""
    prompts = random_prompts(args.warmup, args.input_tokens, vocab_size, args.seed + 1_000_003)
    return [_request(args, i, prompt, 0.0) for i, prompt in enumerate(prompts)]


def _request(args: argparse.Namespace, index: int, prompt: list[int], at: float) -> Request:
    seed = args.seed * 1_000_003 + index
    return Request(index, prompt, args.output_tokens, at, seed, args.temperature, args.ignore_eos)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    model = find_model(args.address, args.model, timeout=30.0)
    shard = Shard(
        partial(GrpcDriver, args.address, model.name, args.timeout),
        make_requests(args, model.vocab_size),
        0 if args.request_rate else args.concurrency or 1,
        warmup_requests(args, model.vocab_size),
    )
    records, result = run_load(shard, args.processes)
    print(table(result))
    if args.json:
        arguments: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        body = {"arguments": arguments, "model": model.name, "figures": result}
        args.json.write_text(json.dumps(body | {"requests": [record.as_dict() for record in records]}, indent=1))
    return 0 if not result["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
