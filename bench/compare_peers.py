"""Stepwire and its peers on one workload, in one run, repeats interleaved; prints ratios.

::

    python -m bench.compare_peers --model models/SmolLM2-135M-Instruct.Q4_1.gguf --workload workload.json \\
        --weights float16,int8 --vllm-python PYTHON --hf-model DIR \\
        --openvino-python PYTHON --ov-model fp32=DIR --ov-model int8=DIR --repeats 3 --json out.json

All peers must have been given the same (dequantised) weights; ratios are ours, for each of our weight types, over each
engine's. Every repeat rotates the prompts, so that no prefix
cache can answer from an earlier repeat; ``prefix`` is the case where requests of one wave share 512 tokens. A peer is
stopped (SIGSTOP) while another runs. A repeat during which other processes used more than ``--disturbed`` of the
machine is marked and kept out of the medians where undisturbed ones exist.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.load.engines import Engine, OpenVino, Stepwire, Vllm, settle
from bench.load.machine import MachineWatch
from bench.load.processes import stop_on_sigterm
from bench.load.prompts import workload_prompts
from bench.load.record import Request


@dataclass(slots=True, frozen=True)
class Case:
    prompts: str  # case of the workload file
    streams: int
    output_tokens: int


OURS = "stepwire"
CASES = {
    "single": Case("single", 1, 128),
    "b8": Case("batch", 8, 128),
    "b32": Case("batch", 32, 128),
    "b64": Case("batch", 64, 128),
    "prefix": Case("prefix", 32, 32),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Stepwire's model: GGUF file or folder")
    parser.add_argument("--weights", default="float16", help="Stepwire's weight types, comma-separated")
    parser.add_argument("--executor-flags", default="", help="more flags for executor_svc, in one string")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--disturbed", type=float, default=0.06, help="share of the machine used by others")
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--hf-model", type=Path)
    parser.add_argument("--openvino-python", type=Path)
    parser.add_argument(
        "--ov-model", action="append", default=[], metavar="NAME=DIR", help="may be given several times"
    )
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if (args.vllm_python is None) != (args.hf_model is None):
        parser.error("--vllm-python and --hf-model go together")
    if (args.openvino_python is None) != (not args.ov_model):
        parser.error("--openvino-python and --ov-model go together")
    if not all("=" in model for model in args.ov_model):
        parser.error("--ov-model: NAME=DIR, as fp32=smollm2-ov-fp32")
    unknown = set(args.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"--cases {sorted(unknown)}: some of {', '.join(CASES)}")
    return args


def start_engines(args: argparse.Namespace, logs: Path, stack: ExitStack) -> list[Engine]:
    """Starts them one after another, each paused once it is up, so that none disturbs another's start."""
    makers: list[Callable[[], Engine]] = []
    if args.vllm_python:
        makers.append(lambda: Vllm(args.vllm_python, args.hf_model, logs))
    for model in args.ov_model:
        kind, _, folder = model.partition("=")
        makers.append(partial(OpenVino, args.openvino_python, Path(folder), logs, f"openvino-{kind}"))
    for weights in args.weights.split(","):
        flags = ["--weights", weights, *args.executor_flags.split()]
        makers.append(partial(Stepwire, args.model, logs, flags, f"{OURS}-{weights}"))
    engines = []
    for make in makers:
        engine = make()
        stack.callback(engine.stop)
        engine.wave(make_requests(args.workload, Case("warm", 4, 16), 0))
        engine.pause()
        engines.append(engine)
        print(f"# {engine.name} is up", file=sys.stderr, flush=True)
    return engines


def make_requests(workload: Path, case: Case, repeat: int) -> list[Request]:
    prompts = workload_prompts(workload, case.prompts, case.streams, repeat)
    return [Request(i, prompt, case.output_tokens) for i, prompt in enumerate(prompts)]


def measure(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    engine.resume()
    settle()
    with MachineWatch(engine.pids) as watch:
        result = engine.wave(requests)
    engine.pause()
    return result | {"others": watch.others, "steal": watch.steal}


def main() -> int:
    args = parse_args()
    stop_on_sigterm()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in args.cases.split(",")}
    with ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-peers-")))
        logs.mkdir(parents=True, exist_ok=True)
        engines = start_engines(args, logs, stack)
        for repeat in range(args.repeats):
            for case, by_engine in results.items():
                for engine in engines[repeat % len(engines) :] + engines[: repeat % len(engines)]:
                    result = measure(engine, make_requests(args.workload, CASES[case], repeat + 1))
                    by_engine.setdefault(engine.name, []).append(result)
                    print(f"# {case} {repeat} {engine.name}: {brief(result)}", file=sys.stderr, flush=True)
    report = summarise(results, args.disturbed)
    print(render(report))
    if args.json:
        args.json.write_text(json.dumps({"medians": report, "runs": results}, indent=1))
    return 0


def brief(result: dict[str, Any]) -> str:
    return (
        f"{result['output_throughput']:.1f} tok/s, TTFT {result['ttft_ms']['mean']:.0f} ms, "
        f"TPOT {result['tpot_ms']['mean']:.1f} ms, {result['duration_s']:.2f} s, others {result['others']:.1%}"
        + (f", failures {result['failures']}" if result["failures"] else "")
    )


def summarise(results: dict[str, dict[str, list[dict[str, Any]]]], limit: float) -> dict[str, dict[str, Any]]:
    """Medians of each case and engine over undisturbed, complete runs; ``ratios``: each of our weight types' figures
    over the engine's."""
    report: dict[str, dict[str, Any]] = {}
    for case, by_engine in results.items():
        rows = report[case] = {}
        for name, runs in by_engine.items():
            complete = [run for run in runs if not run["failures"]]
            quiet = [run for run in complete if run["others"] < limit]
            chosen = quiet or complete
            rows[name] = {"runs": len(runs), "complete": len(complete), "quiet": len(quiet)}
            if chosen:
                rows[name] |= {
                    "output_throughput": statistics.median(run["output_throughput"] for run in chosen),
                    "decode_rate": statistics.median(1000 / run["tpot_ms"]["mean"] for run in chosen),
                    "ttft_ms": statistics.median(run["ttft_ms"]["mean"] for run in chosen),
                    "tpot_ms": statistics.median(run["tpot_ms"]["mean"] for run in chosen),
                    "duration_s": statistics.median(run["duration_s"] for run in chosen),
                }
        measured = {name: row for name, row in rows.items() if "output_throughput" in row}
        ours = {name.removeprefix(f"{OURS}-"): row for name, row in measured.items() if name.startswith(OURS)}
        for row in measured.values():
            row["ratios"] = {
                weights: {key: mine[key] / row[key] for key in ("output_throughput", "decode_rate")}
                for weights, mine in ours.items()
            }
    return report


def render(report: dict[str, dict[str, Any]]) -> str:
    """A row for each case and engine; per weight type of ours, the ratios of output throughput and of decode rate."""
    kinds = list(
        dict.fromkeys(kind for rows in report.values() for row in rows.values() for kind in row.get("ratios", ()))
    )
    columns = f"{'tok/s':>9}{'TTFT ms':>10}{'TPOT ms':>9}{'total s':>9}{'quiet':>7}"
    columns += "".join(f"{kind + ' tok/s, decode ratio':>30}" for kind in kinds)
    lines = [f"{'case':<8}{'engine':<18}{columns}"]
    for case, rows in report.items():
        for name, row in rows.items():
            if "output_throughput" not in row:
                lines.append(f"{case:<8}{name:<18}  no complete run of {row['runs']}")
                continue
            times = (
                f"{row['ttft_ms']:>10.0f}{row['tpot_ms']:>9.1f}{row['duration_s']:>9.2f}{row['quiet']:>5}/{row['runs']}"
            )
            ratios = "".join(
                f"{row['ratios'][kind]['output_throughput']:>24.2f}{row['ratios'][kind]['decode_rate']:>6.2f}"
                for kind in kinds
                if kind in row["ratios"]
            )
            lines.append(f"{case:<8}{name:<18}{row['output_throughput']:>9.1f}{times}{ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
