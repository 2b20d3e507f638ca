"""``python -m bench.idle_gap``: how long a device waits for the next plan, and how many devices are kept fed.

A scheduler core as a process of its own, 1, 2, 4, ... simulated executors on the real link (5 ms a step, 512 sequences
each), and before the core either this process in the place of an API worker (``--api-workers 0``) or so many real API
workers, whose streams a client takes as ids. Reported for each number of executors: how far they were fed (the tokens
made, over those of devices that run full steps without a gap), the idle share of a device's time (gaps between steps;
its first and last steps count too), the processor time of core and API workers, the bytes on the link, and what follows
from them:

    fed by a core        step time / core's processor time a step
    fed by an API worker step time / (processor time a token * sequences)
    fed by a link        bytes a second of ``--link-gbit`` / (bytes a step / step time), the busier direction

A process that has less than a processor to itself has gaps that are not the scheduler's: processor times hold there
too. ``--step-ms 50 --fed-step-ms 5`` runs ten times as many executors on the same processors, with the same work a
step, and says how many of 5 ms would be fed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.api_worker import METHOD, Worker, cpu_seconds, free_port
from bench.bare_worker import BareWorker
from bench.drain_client import DrainClient
from protos import front
from protos.stepwire.v1 import inference_pb2 as pb

MODEL = "simulated"
CHANNELS = 4  # a worker
MAX_TOKENS = 8000  # a stream


def stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(number)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue


def link_bytes(port: int) -> tuple[int, int]:
    """Bytes that the core's end of the executors' connections has sent, and received (as `ss` tells)."""
    command = ["ss", "-tinH", "state", "established", f"( sport = :{port} )"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sent, received = (sum(map(int, re.findall(rf"\b{name}:(\d+)", told))) for name in ("bytes_sent", "bytes_received"))
    return sent, received


def drain(addresses: list[str], streams: int, prompt: int) -> None:
    """Opens the streams and reads them until it is terminated."""
    clients = [
        DrainClient(host, int(port))
        for host, _, port in (address.rpartition(":") for address in addresses)
        for _ in range(CHANNELS)
    ]
    for number in range(streams):
        request = pb.GenerateRequest(
            request_id=f"r{number}",
            model=MODEL,
            token_ids=pb.TokenIds(ids=[1 + number % 1000] * prompt),
            stopping=pb.Stopping(max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        clients[number % len(clients)].open(METHOD.encode(), request.SerializeToString())
    waiting = {client.socket: client for client in clients}
    while waiting:
        for ready in select.select(list(waiting), [], [])[0]:
            if not waiting[ready].read():
                del waiting[ready]


def tokens_so_far(worker: BareWorker) -> int:
    """By the core's own count."""
    worker.status = None
    worker.send(front.GetStatus(1))
    while worker.status is None:
        worker.receive(1.0)
    counters = worker.status["counters"]
    assert isinstance(counters, dict)
    tokens: int = counters["tokens"]
    return tokens


def measure(executors: int, options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idle-gap-")))
        port = free_port()
        address, front_address = f"tcp://127.0.0.1:{port}", f"ipc://{directory}/front"
        command = [sys.executable, "-m", "scheduler_svc.core", "--listen", address, "--front", front_address]
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
        bare = stack.enter_context(BareWorker(front_address, keep=False, window=1 << 22, wait=120.0))
        bare.wait_for_model(MODEL, executors)
        total = executors * options.sequences
        workers = [Worker(front_address, directory / f"api-{i}.log", f"api-{i}") for i in range(options.api_workers)]
        for worker in workers:
            stack.callback(worker.stop)
        if workers:
            arguments = ([worker.address for worker in workers], total, options.prompt)
            client = multiprocessing.get_context("spawn").Process(target=drain, args=arguments)
            client.start()
            stack.callback(client.join)
            stack.callback(client.terminate)
        else:
            for stream in range(total):
                bare.submit(stream, MODEL, [1 + stream % 1000] * options.prompt, MAX_TOKENS, stream)
        while tokens_so_far(bare) < 4 * total:  # all of them run
            bare.receive(0.1)
        pids = [core.pid, *(process.pid for process in running), *(worker.pid for worker in workers)]
        before, tokens, started = [cpu_seconds(pid) for pid in pids], tokens_so_far(bare), time.monotonic()
        bytes_before = link_bytes(port)
        while (elapsed := time.monotonic() - started) < options.seconds and not bare.ends:
            bare.receive(0.1)
        after, made = [cpu_seconds(pid) for pid in pids], tokens_so_far(bare) - tokens
        used = [late - early for late, early in zip(after, before, strict=True)]
        sent, received = (late - early for late, early in zip(link_bytes(port), bytes_before, strict=True))
        for process in running:  # the second signal: leave at once, what runs does not matter any more
            process.send_signal(signal.SIGTERM)
        for process in running:
            stop(process)
        gaps = [json.loads(report.read_text()) for report in reports]
        steps = made / options.sequences
        core_us = 1e6 * used[0] / steps
        token_us = 1e6 * sum(used[1 + executors :]) / made
        fed_ms = options.fed_step_ms or options.step_ms
        link = options.link_gbit * 1e9 / 8 * fed_ms / 1000.0
        return {
            "executors": executors,
            "api_workers": options.api_workers,
            "sequences_each": options.sequences,
            "step_ms": options.step_ms,
            "jitter": options.jitter,
            "seconds": round(elapsed, 2),
            "steps_a_second_each": round(steps / elapsed / executors, 1),
            "tokens_a_second": round(made / elapsed),
            "fed": round(steps / elapsed / executors * options.step_ms / 1000.0, 4),
            "idle": [report["idle"] for report in gaps],
            "gap_us_p50": [report["gap_us_p50"] for report in gaps],
            "gap_us_p99": [report["gap_us_p99"] for report in gaps],
            "core_cpu_us_a_step": round(core_us, 1),
            "core_cpu_share": round(used[0] / elapsed, 3),
            "executor_cpu_us_a_step": round(1e6 * sum(used[1 : 1 + executors]) / steps, 1),
            "api_cpu_us_a_token": round(token_us, 2),
            "api_cpu_share": [round(seconds / elapsed, 3) for seconds in used[1 + executors :]],
            "link_bytes_a_step": [round(sent / steps), round(received / steps)],
            "fed_step_ms": fed_ms,
            "fed_by_a_core": round(1000.0 * fed_ms / core_us, 1),
            "fed_by_an_api_worker": round(1000.0 * fed_ms / (token_us * options.sequences), 2) if token_us else None,
            "fed_by_a_link": round(link / max(sent / steps, received / steps)),
            "load_average": os.getloadavg()[0],
        }


_COLUMNS = (
    f"{'executors':>9} {'API':>4} {'steps/s each':>12} {'tokens/s':>9} {'fed':>6} {'idle':>6} "
    f"{'core us/step':>12} {'cores':>6} "
    f"{'API us/token':>12} {'cores':>6} {'link B/step down, up':>21} {'fed by: core':>12} {'API':>6} {'link':>6}  "
    "ends at"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    fed = {"core": row["fed_by_a_core"], "API worker": row["fed_by_an_api_worker"], "link": row["fed_by_a_link"]}
    ends = min((count, name) for name, count in fed.items() if count is not None)[1]
    down, up = row["link_bytes_a_step"]
    api = row["fed_by_an_api_worker"]
    return (
        f"{row['executors']:>9} {row['api_workers']:>4} {row['steps_a_second_each']:>12} {row['tokens_a_second']:>9} "
        f"{row['fed']:>6.1%} {statistics.median(row['idle']):>6.1%} "
        f"{row['core_cpu_us_a_step']:>12} {row['core_cpu_share']:>6} "
        f"{row['api_cpu_us_a_token']:>12} {sum(row['api_cpu_share']):>6.2f} {down:>12}, {up:>7} "
        f"{row['fed_by_a_core']:>12} {'' if api is None else api:>6} {row['fed_by_a_link']:>6}  {ends}"
    )


def main() -> int:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--executors", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--api-workers", type=int, default=0, help="0: this process takes the tokens itself")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--fed-step-ms", type=float, default=0.0, help="the step time to say it for (0: --step-ms)")
    parser.add_argument("--jitter", type=float, default=0.05)
    parser.add_argument("--link-gbit", type=float, default=10.0, help="of the network to the executors")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    print(_COLUMNS)
    for executors in options.executors:
        rows.append(measure(executors, options))
        print(line(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
