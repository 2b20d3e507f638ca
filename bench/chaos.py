"""Kill anything: streams of all kinds under a seeded schedule of faults, against an undisturbed run of the same.

    python -m bench.chaos --streams 200 --kills 60 --seed 1 --json chaos.json

Real processes: one scheduler service (a core, two API workers) and executors behind relays whose cables can be pulled.
Faults are fired by the tokens that have come, in a seeded order: SIGKILL, SIGSTOP (long enough to be given up, and
shorter), SIGTERM, and partitions, of every kind of process. The model is tiny, random and float32 unless --model names
another. Keys of the JSON: ``lost``, ``duplicated``, ``changed`` (streams), ``problems`` (broken invariants and leaks),
``health_lies`` (SERVING for more than 2 s while nobody could be served), ``orphans``, ``false_deaths``, and the times.
Exit status 0: all of these are empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.faults import log_watch
from bench.faults.acts import KINDS, LONG_FREEZE, SILENT, Acts, Fault, schedule
from bench.faults.health import Watchman
from bench.faults.relay import Relay
from bench.faults.streams import Outcome, kind_of, make_requests, run_all, run_one, with_stop
from bench.faults.verdict import gap_at, judge, percentile, spread
from protos.stepwire.v1 import inference_pb2 as pb
from stepwire import AsyncClient
from tests.e2e.harness import Cluster
from tests.e2e.process import bounded, gone
from tests.e2e.verify import settled

EXPLAINED_FOR = LONG_FREEZE + 8.0  # seconds after a fault's begin in which a death may still be its own
PREFILL_PROBE = 1024  # tokens
MUST_BE_EMPTY = (
    *("lost", "duplicated", "changed", "problems", "health_lies"),
    *("orphans", "false_deaths", "faults_failed", "undetected"),
)
APART = 2.0  # seconds between the end of a fault and the next one
MOST_PENDING = 3  # faults under way
CLIENTS = 6  # each with a connection of its own, so that every API worker has some
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--streams", type=int, default=200, metavar="N")
    parser.add_argument("--kills", type=int, default=60, metavar="K", help="faults of all kinds")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--model", type=Path, help="a checkpoint (default: a tiny random float32 one)")
    parser.add_argument("--executors", type=int, default=2)
    parser.add_argument("--api-workers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=24, help="streams open at once")
    parser.add_argument("--output-tokens", type=int, default=160, help="most of a choice")
    parser.add_argument("--kinds", help=f"faults to use, separated by commas (all): {', '.join(KINDS)}")
    parser.add_argument("--apart", action="store_true", help="no fault before the one before it is over")
    parser.add_argument("--executor-flag", action="append", default=[], metavar="FLAG")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the logs there")
    args = parser.parse_args(argv)
    args.kinds = [kind.strip() for kind in args.kinds.split(",")] if args.kinds else list(KINDS)
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds: unknown {', '.join(sorted(unknown))}")
    if args.streams < 1 or args.kills < 0 or args.executors < 1:
        parser.error("--streams and --executors must be at least 1, --kills at least 0")
    return args


class Chaos:
    """One run: the cluster, the undisturbed answers, the disturbed ones, the verdict."""

    def __init__(self, args: argparse.Namespace, folder: Path, model: Path) -> None:
        self.args = args
        self.model = model
        self.cluster = Cluster(folder)
        self.relays: dict[str, Relay] = {}
        self.faults: list[Fault] = []
        self.watchman = Watchman(self.cluster.address, self.cluster.front_endpoint)
        self.tokens = 0

    async def run(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        host, port = self.cluster.link.removeprefix("tcp://").rsplit(":", 1)
        for i in range(self.args.executors):
            relay = Relay(host, int(port))
            await relay.start()
            self.relays[f"e{i}"] = relay
        acts = Acts(
            self.cluster, self.model, self.relays, self.args.executor_flag,
            lambda act: loop.call_soon_threadsafe(act), self._start_scheduler, self.args.seed,
        )  # fmt: skip
        try:
            await asyncio.to_thread(self._start, acts)
            clients = [AsyncClient(self.cluster.address, options=OWN_CONNECTION) for _ in range(CLIENTS)]
            try:
                requests, expected, rate = await self._undisturbed(clients[0])
                outcomes = await self._disturbed(clients, acts, requests, expected)
            finally:
                for client in clients:
                    await client.close()
            await asyncio.to_thread(self._settle)
            return await asyncio.to_thread(self._report, acts, requests, expected, outcomes, rate)
        finally:
            for relay in self.relays.values():
                await relay.close()
            await asyncio.to_thread(self.cluster.close)

    # -- the cluster -------------------------------------------------------------------------------------------------

    def _start_scheduler(self) -> None:
        for _ in bounded(60.0, "the scheduler does not start", poll=0.2):
            try:
                self.cluster.start_scheduler("--drain-limit", "5", api_workers=self.args.api_workers)
                return
            except AssertionError:  # a port that the former one has not given back yet
                continue

    def _start(self, acts: Acts) -> None:
        self._start_scheduler()
        for name in self.relays:
            acts.start_executor(name)
        self.cluster.wait_ready(self.args.executors)

    # -- the two runs ------------------------------------------------------------------------------------------------

    async def _undisturbed(self, client: AsyncClient) -> tuple[list[pb.GenerateRequest], list[Outcome], float]:
        """(requests, their answers, tokens/s of a prefill)."""
        (model,) = await client.models()
        args = self.args
        context = min(model.context_length, model.max_sequence_tokens)
        requests = make_requests(args.streams, args.output_tokens, model.vocab_size, context, args.seed)
        expected = await run_all([client], requests, args.concurrency, 1)
        for i, outcome in enumerate(expected):
            if outcome.kind == "stop":
                requests[i] = with_stop(requests[i], outcome.texts[0])
                expected[i] = await run_one(client, i, requests[i], 1, lambda count: None)
        failed = [outcome.error for outcome in expected if outcome.error]
        if failed:
            raise RuntimeError(f"the undisturbed run failed: {failed[0]}")
        return requests, expected, await self._prefill_rate(client, model.vocab_size, context)

    async def _prefill_rate(self, client: AsyncClient, vocab_size: int, context: int) -> float:
        rng = random.Random(self.args.seed + 77)
        length = min(PREFILL_PROBE, context - 2)
        request = pb.GenerateRequest(sampling=pb.Sampling(temperature=0.0), stopping=pb.Stopping(max_tokens=1))
        request.token_ids.ids.extend(rng.randrange(3, vocab_size) for _ in range(length))
        outcome = await run_one(client, 0, request, 1, lambda count: None)
        return length / (outcome.arrivals[0] - outcome.began)

    async def _disturbed(
        self, clients: list[AsyncClient], acts: Acts, requests: list[pb.GenerateRequest], expected: list[Outcome]
    ) -> list[Outcome]:
        total = sum(outcome.tokens for outcome in expected)
        self.faults = schedule(self.args.kills, total, self.args.kinds, random.Random(self.args.seed))
        due = list(self.faults)
        pool = ThreadPoolExecutor(max(4, self.args.executors + 4), thread_name_prefix="fault")
        running: list[asyncio.Future[None]] = []

        def on_tokens(count: int) -> None:
            self.tokens += count
            while due and due[0].at_tokens <= self.tokens:
                before = self.faults[len(running) - 1] if running else None
                if self.args.apart and before is not None and (not before.over or time.time() < before.over + APART):
                    return
                fault = due.pop(0)
                print(f"{time.strftime('%H:%M:%S')} {self.tokens}/{total} tokens: {fault.kind}", flush=True)
                running.append(asyncio.get_running_loop().run_in_executor(pool, acts.run, fault))

        async def gate() -> None:
            """Streams are there for the faults: none begins while many of these are still under way."""
            most = 1 if self.args.apart else MOST_PENDING
            while len(pending := [future for future in running if not future.done()]) >= most:
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

        stop = threading.Event()
        checker = asyncio.create_task(asyncio.to_thread(self.watchman.run, stop))
        try:
            outcomes = await run_all(clients, requests, self.args.concurrency, 1, on_tokens, gate)
            acts.stop()
            await asyncio.gather(*running)
        finally:
            stop.set()
            await checker
            pool.shutdown(wait=False)
        return outcomes

    def _settle(self) -> None:
        try:
            self.cluster.wait_ready(self.args.executors)
            settled(self.cluster)
        except AssertionError as error:
            self.watchman.problems.append(f"not settled: {error}"[:2000])

    # -- the verdict -------------------------------------------------------------------------------------------------

    def _report(
        self,
        acts: Acts,
        requests: list[pb.GenerateRequest],
        expected: list[Outcome],
        outcomes: list[Outcome],
        rate: float,
    ) -> dict[str, Any]:
        faults = [fault for fault in self.faults if fault.when]
        self.cluster.close()
        text = (self.cluster.folder / "scheduler.log").read_text(errors="replace")
        deaths = log_watch.deaths(log_watch.parse(text))
        for fault in faults:
            for outcome in outcomes:
                gap = gap_at(outcome, fault.monotonic)
                if gap is not None:
                    fault.gaps.append(gap)
                    fault.recomputed += outcome.prompt_tokens + outcome.tokens
            ages = [when - fault.when for when, who, _ in deaths if _is(who, fault)]
            # Later, it was another fault's; a core that came after this one never knew this one's executor.
            found = [age for age in ages if -0.01 <= age <= max(LONG_FREEZE, fault.over - fault.when)]
            if fault.kind in SILENT and found and fault.kind.split()[0] != "scheduler":
                fault.detected_after = round(max(0.0, min(found)), 3)
        verdicts: dict[str, list[dict[str, Any]]] = {"lost": [], "duplicated": [], "changed": []}
        for i, (want, got) in enumerate(zip(expected, outcomes, strict=True)):
            kind, why = judge(want, got)
            if kind:
                facts = {"stream": i, "kind": kind_of(i), "why": why, "continuations": got.continuations}
                verdicts[kind].append(facts)
        detection = [f.detected_after for f in faults if f.detected_after is not None]
        gaps = [gap for fault in faults for gap in fault.gaps]
        recomputed = percentile([f.recomputed for f in faults], 0.99) or 0
        return {
            "streams": len(requests),
            "kills": len(faults),
            "seed": self.args.seed,
            "apart": self.args.apart,
            "tokens": sum(outcome.tokens for outcome in expected),
            **verdicts,
            "problems": sorted(set(self.watchman.problems)),
            "health_lies": self.watchman.lies,
            "orphans": sorted(pid for pid in acts.pids if not gone(pid)),
            "false_deaths": [
                f"{event}: {who}"
                for when, who, event in deaths
                if not any(_is(who, f) and f.when - 0.1 <= when <= max(f.when + EXPLAINED_FOR, f.over) for f in faults)
            ],
            "faults_failed": [f"{fault.kind}: {fault.error}" for fault in faults if fault.error],
            "undetected": [f"{f.kind} {f.target}" for f in faults if _undetected(f)],
            "continuations": sum(outcome.continuations for outcome in outcomes),
            "gap_s": spread(gaps),
            "detection_s": spread(detection),
            "recomputed_tokens_p99": recomputed,
            "prefill_tokens_per_s": round(rate, 1),
            "gap_bound_s": round((percentile(detection, 0.99) or 0.0) + recomputed / rate + 0.5, 3),
            "by_kind": {kind: _of_kind([f for f in faults if f.kind == kind]) for kind in self.args.kinds},
        }


def _is(who: str, fault: Fault) -> bool:
    """May a death of ``who`` (an executor's name, ``core``, ``api-0`` ...) come of this fault?"""
    target = fault.kind.split()[0]
    if not KINDS[fault.kind]:
        return False
    if target == "executor":
        return who == fault.target
    return target == "scheduler" or who == "core" == target or (target == "api" and who.startswith("api"))


def _undetected(fault: Fault) -> bool:
    """An executor that was given up by nobody may have had nothing to do, but those of the supervisor are watched."""
    return fault.kind in SILENT and fault.kind.split()[0] in ("core", "api") and fault.detected_after is None


def _of_kind(faults: list[Fault]) -> dict[str, Any]:
    found = [fault.detected_after for fault in faults if fault.detected_after is not None]
    gaps = [gap for fault in faults for gap in fault.gaps]
    over = [fault.over - fault.when for fault in faults]
    return {"count": len(faults), "detection_s": spread(found), "gap_s": spread(gaps), "over_s": spread(over)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="chaos-") as made:
        folder = args.keep or Path(made)
        model = args.model or tiny_model(Path(made))
        return asyncio.run(Chaos(args, folder, model).run())


def tiny_model(folder: Path) -> Path:
    from tests.executor.model.tiny import make_tiny_llama

    return make_tiny_llama(folder / "tiny", max_position_embeddings=4096)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.model is None and not args.executor_flag:
        args.executor_flag = ["--weights", "float32"]
    began = time.monotonic()
    report = run(args) | {"seconds": 0.0}
    report["seconds"] = round(time.monotonic() - began, 1)
    text = json.dumps(report, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    return 1 if any(report[key] for key in MUST_BE_EMPTY) else 0


if __name__ == "__main__":
    sys.exit(main())
