"""Tokens a second a core of one API worker process, and what a new stream waits meanwhile.

    python -m bench.api_worker [--streams 1,16,64,256,1024] [--seconds 8] [--rounds 1] [--probe-interval 0.05]
        [--json FILE]

A scripted core (scripted_core.py) feeds the real worker process over the real socket as fast as credit lets, one token
a stream in each batch; a client process takes all streams (drain_client.py). First with token ids only (a model without
a tokenizer), then with text and two stop strings that are looked for and never found. "A core": tokens over the
processor time of the worker process, so client and core may share the machine with it.

Meanwhile another client opens a stream of one token every ``--probe-interval`` seconds, and the core answers at once.
``first``: from the core's answer until the worker has the first token in a message for gRPC, by the server's clocks;
``cpu``: the processor time of the worker from its Submit until then; ``whole``: from the call to the receipt, by the
client's clock. Every probe that is sent before the last quarter of a second of the load counts, whenever it ends (all
streams end at one moment, which is a load of another kind).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import ByteLevelBPETokenizer

from bench.drain_client import DrainClient
from bench.load.processes import free_port
from bench.scripted_core import IDS_MODEL, PROBE, TEXT_MODEL, ScriptedCore
from protos.stepwire.v1 import inference_pb2 as pb

METHOD = "/stepwire.v1.Inference/GenerateStream"
STOPS = ("\n\nUser:", "<|end of answer|>")
AT_LEAST = {IDS_MODEL: 60_000, TEXT_MODEL: 30_000}  # tokens a second a core at 256 streams
FIRST_TOKEN_MS = 50.0  # p99
CHANNELS = 4
LONGEST = 900_000  # tokens: the core ends every stream before


def sample_text() -> str:
    """English prose with some code in it: this bench's own documentation and sources."""
    root = Path(__file__).resolve().parent.parent
    files = [*sorted(root.glob("docs/*.md")), *sorted(root.glob("scheduler_svc/core/*.py"))]
    return "\n".join(file.read_text() for file in files)


def request(model: str, request_id: str, tokens: int) -> pb.GenerateRequest:
    stopping = pb.Stopping(max_tokens=tokens, ignore_eos=True, stop=STOPS if model == TEXT_MODEL else ())
    prompt = pb.TokenIds(ids=[5, 6, 7])
    return pb.GenerateRequest(request_id=request_id, model=model, token_ids=prompt, stopping=stopping)


# -- the two client processes ------------------------------------------------------------------------------------------


def read_streams(address: str, model: str, streams: int, answer: Connection) -> None:
    """Reads all of them to their end, without parsing any message but the last. Answers with (messages, tokens)."""

    host, _, port = address.rpartition(":")
    clients = [DrainClient(host, int(port)) for _ in range(min(CHANNELS, streams))]
    for number in range(streams):
        message = request(model, f"load{number}", LONGEST).SerializeToString()
        clients[number % len(clients)].open(METHOD.encode(), message)
    waiting = {client.socket: client for client in clients}
    while waiting:
        for ready in select.select(list(waiting), [], [])[0]:
            if not waiting[ready].read():
                del waiting[ready]
    last = [pb.GenerateStreamResponse.FromString(data) for client in clients for data in client.last.values()]
    for client in clients:
        client.close()
    answer.send((sum(client.messages for client in clients), sum(message.usage.completion_tokens for message in last)))


def probe(address: str, interval: float, line: Connection) -> None:
    """Opens a stream of one token every ``interval`` seconds, whether or not the last one ended, until told to stop;
    sends (id, called, received) of each."""
    times = []
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(256) as pool:
        call = channel.unary_stream(
            METHOD,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateStreamResponse.FromString,
        )

        def one(name: str) -> None:
            called, received = time.monotonic(), 0.0
            for message in call(request(IDS_MODEL, name, 1), wait_for_ready=True):
                if message.choices and not received:
                    received = time.monotonic()
            times.append((name, called, received))

        for number in count():
            if line.poll(interval):
                break
            pool.submit(one, f"{PROBE}{os.getpid()}-{number}")
    line.send(times)


# -- the bench ---------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Worker:
    """An API worker process, once it serves."""

    def __init__(self, front: str, log: Path, name: str = "bench") -> None:
        self.address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "scheduler_svc.api", "--front", front, "--listen", self.address]
        command += ["--worker-name", name, "--leave-grace", "0", "--drain-limit", "1", "--max-streams", "16384"]
        command += ["--log-level", "debug", "--log-format", "json"]
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        with grpc.insecure_channel(self.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30
            )
            next(state for state in watch if state.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu(self) -> float:
        """Seconds of processor time."""
        return cpu_seconds(self.pid)

    def first_tokens(self) -> dict[str, dict[str, Any]]:
        """The worker's own record of each first token (``scheduler_svc.api.stream``), by request id."""
        records = map(json.loads, self._log.read_text().splitlines())
        return {record["request"]: record for record in records if record["event"] == "first token"}

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(
    core: ScriptedCore, worker: Worker, model: str, streams: int, seconds: float, interval: float
) -> dict[str, Any]:
    """One line of the table."""
    spawn = multiprocessing.get_context("spawn")
    core.probes_answered.clear()
    core.expect(streams, seconds)
    mine, theirs = spawn.Pipe()
    reader = spawn.Process(target=read_streams, args=(worker.address, model, streams, theirs))
    line, probe_line = spawn.Pipe()
    prober = spawn.Process(target=probe, args=(worker.address, interval, probe_line))
    prober.start()
    reader.start()
    if not core.wave_began.wait(120):
        raise RuntimeError("the streams did not all arrive")
    began, cpu = time.monotonic(), worker.cpu()
    while not mine.poll(1.0):
        if not reader.is_alive() and not mine.poll():
            raise RuntimeError("the client ended without an answer")
    messages, tokens = mine.recv()
    took, used = time.monotonic() - began, worker.cpu() - cpu
    if tokens != streams * core.position:
        raise RuntimeError(f"{tokens} of {streams * core.position} tokens came")
    line.send("stop")
    probes = line.recv()
    reader.join()
    prober.join()
    during = [probe for probe in probes if began <= probe[1] <= core.ends_at - 0.25]
    server = worker.first_tokens()
    first, first_cpu = [], []
    for name, _, _ in during:
        times = server[name]
        first.append(times["made"][0] - core.probes_answered[name])
        first_cpu.append(times["made"][1] - times["submitted"][1])
    whole = [received - called for _, called, received in during]
    return {
        "model": model,
        "streams": streams,
        "tokens": tokens,
        "tokens_a_second_a_core": tokens / used,
        "tokens_a_second": tokens / took,
        "worker_cores": used / took,
        "tokens_a_message": tokens / messages,
        "probes": len(during),
        "first_token_ms_p50": _quantile(first, 0.5),
        "first_token_ms_p99": _quantile(first, 0.99),
        "first_token_cpu_ms_p50": _quantile(first_cpu, 0.5),
        "first_token_cpu_ms_p99": _quantile(first_cpu, 0.99),
        "whole_ms_p50": _quantile(whole, 0.5),
        "whole_ms_p99": _quantile(whole, 0.99),
    }


def _quantile(seconds: list[float], share: float) -> float:
    """Milliseconds."""
    return 1e3 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] if seconds else float("nan")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,16,64,256,1024", help="numbers of free-running streams")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=1, help="the median of so many measurements")
    parser.add_argument("--probe-interval", type=float, default=0.05, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    text = sample_text()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=4096, special_tokens=["<|end|>"], show_progress=False)
    sample = np.array(tokenizer.encode(text[:40_000]).ids, dtype="<i4")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        front = f"ipc://{folder}/front"
        core = ScriptedCore(front, tokenizer.to_str().encode(), tokenizer.get_vocab_size(), sample)
        core.start()
        worker = Worker(front, Path(folder) / "worker.log")
        try:
            print(f"{'model':>5} {'streams':>8} {'tok/s/core':>11} {'tok/s':>9} {'cores':>6} {'tok/msg':>8} "
                  f"{'first p50':>10} {'p99 ms':>8} {'cpu p50':>8} {'p99 ms':>8} {'whole p50':>10} {'p99 ms':>8} "
                  f"{'probes':>7}")  # fmt: skip
            measure(core, worker, TEXT_MODEL, 4, 3.0, args.probe_interval)  # warm
            for model in (IDS_MODEL, TEXT_MODEL):
                for streams in [int(part) for part in args.streams.split(",")]:
                    runs = [
                        measure(core, worker, model, streams, args.seconds, args.probe_interval)
                        for _ in range(args.rounds)
                    ]
                    line = {
                        k: v if isinstance(v, str) else statistics.median(r[k] for r in runs)
                        for k, v in runs[0].items()
                    }
                    lines.append(line)
                    print(f"{model:>5} {streams:>8} {line['tokens_a_second_a_core']:>11.0f} "
                          f"{line['tokens_a_second']:>9.0f} {line['worker_cores']:>6.2f} "
                          f"{line['tokens_a_message']:>8.1f} {line['first_token_ms_p50']:>10.1f} "
                          f"{line['first_token_ms_p99']:>8.1f} {line['first_token_cpu_ms_p50']:>8.1f} "
                          f"{line['first_token_cpu_ms_p99']:>8.1f} {line['whole_ms_p50']:>10.1f} "
                          f"{line['whole_ms_p99']:>8.1f} {line['probes']:>7.0f}", flush=True)  # fmt: skip
        finally:
            worker.stop()
            core.stop()
    verdicts = _verdicts(lines)
    for words, reached in verdicts:
        print(f"{'reached' if reached else 'MISSED '}  {words}")
    if args.json:
        targets = [{"text": words, "reached": reached} for words, reached in verdicts]
        args.json.write_text(json.dumps({"lines": lines, "targets": targets}, indent=1) + "\n")


def _verdicts(lines: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    verdicts = []
    for line in lines:
        if line["streams"] != 256:
            continue
        rate, least = line["tokens_a_second_a_core"], AT_LEAST[line["model"]]
        verdicts.append((f"{line['model']}: {rate:.0f} tokens a second a core at 256 streams (at least {least})",
                         rate >= least))  # fmt: skip
        late = line["first_token_ms_p99"]
        verdicts.append((f"{line['model']}: first token of a new stream {late:.1f} ms p99 at 256 streams (at most 50)",
                         late <= FIRST_TOKEN_MS))  # fmt: skip
    return verdicts


if __name__ == "__main__":
    main()
