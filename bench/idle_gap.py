"""``python -m bench.idle_gap``: how long a device waits for the next plan, by simulated executors on the real link.

A scheduler core as a process of its own, 1, 2, 4, ... simulated executors (5 ms a step, 512 sequences each), and this
process in the place of an API worker. Reported for each number of executors: the idle share of a device's time (gaps
between steps), the core's and the executors' processor time a step, and so how many such executors one core could keep
fed if it had a processor to itself (``fed = step time / core's processor time a step``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.bare_worker import BareWorker

_TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue


def measure(executors: int, options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idle-gap-")))
        address, front = f"tcp://127.0.0.1:{free_port()}", f"ipc://{directory}/front"
        command = [sys.executable, "-m", "scheduler_svc.core", "--listen", address, "--front", front]
        core = subprocess.Popen([*command, "--log-level", "error", "--max-waiting", "1000000"])
        stack.callback(stop, core)
        reports = [directory / f"report-{i}" for i in range(executors)]
        running = []
        for i, report in enumerate(reports):
            command = [sys.executable, "-m", "executor_svc", "--simulate", f"{options.step_ms:g}"]
            command += ["--jitter", str(options.jitter), "--seed", str(i), "--scheduler", address]
            command += ["--executor-name", f"sim-{i}", "--max-slots", str(options.sequences), "--report", str(report)]
            command += ["--context", "65536", "--kv-blocks", str(options.sequences * 512), "--log-level", "error"]
            process = subprocess.Popen(command)
            running.append(process)
            stack.callback(stop, process)
        worker = stack.enter_context(BareWorker(front, keep=False, window=1 << 22))
        worker.wait_for_model("simulated", executors)
        total = executors * options.sequences
        for stream in range(total):
            worker.submit(stream, "simulated", [1 + stream % 1000] * options.prompt, 8000, stream)
        while worker.tokens < 4 * total:  # all of them run
            worker.receive(1.0)
        pids = [core.pid, *(process.pid for process in running)]
        before, tokens, started = [cpu_seconds(pid) for pid in pids], worker.tokens, time.monotonic()
        while (elapsed := time.monotonic() - started) < options.seconds and not worker.ends:
            worker.receive(0.1)
        after, made = [cpu_seconds(pid) for pid in pids], worker.tokens - tokens
        for process in running:  # the second signal: leave at once, what runs does not matter any more
            process.send_signal(signal.SIGTERM)
        for process in running:
            stop(process)
        gaps = [json.loads(report.read_text()) for report in reports]
        steps = made / options.sequences
        core_us = 1e6 * (after[0] - before[0]) / steps
        return {
            "executors": executors,
            "sequences_each": options.sequences,
            "step_ms": options.step_ms,
            "jitter": options.jitter,
            "seconds": round(elapsed, 2),
            "steps_a_second_each": round(steps / elapsed / executors, 1),
            "tokens_a_second": round(made / elapsed),
            "idle": [report["idle"] for report in gaps],
            "gap_us_p50": [report["gap_us_p50"] for report in gaps],
            "gap_us_p99": [report["gap_us_p99"] for report in gaps],
            "core_cpu_us_a_step": round(core_us, 1),
            "core_cpu_share": round((after[0] - before[0]) / elapsed, 3),
            "executor_cpu_us_a_step": round(1e6 * (sum(after[1:]) - sum(before[1:])) / steps, 1),
            "one_core_feeds": round(1000.0 * options.step_ms / core_us, 1),
            "load_average": os.getloadavg()[0],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--executors", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--jitter", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    for executors in options.executors:
        rows.append(measure(executors, options))
        print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
