"""``python -m bench.virtual_time``: the real scheduler core under a day's traffic, in virtual time.

No socket and no waiting: executors are a step-time model (a step, a row, a prompt token, log-normal jitter) on an
event queue, arrivals come from a trace (bursts, tenants, classes, long prompts), and the clock jumps from event to
event. What comes out is what clients would see: time to the first token, time between tokens, by class and by tenant;
and what the core had to do for it: preemptions, and its own processor time a step.

    --executors 8 --slots 512 --requests 100000     sizes that no test machine has
    --executors 1000 --requests 20000               where one core ends: its processor time against the devices'
    --requests 10000 --burst                        all of them at once; half of each tenant's share a prefix

Results follow from ``--seed`` alone, but for the processor times.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from executor_svc.simulate_model import StepTimes
from protos import front, step
from protos.wire import pack_int32, unpack_int32
from scheduler_svc.core import garbage
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.loop import WORKER_FRAMES_A_TURN
from scheduler_svc.core.outbox import EXECUTOR
from scheduler_svc.prefix_hash import block_hashes

VOCAB = 32000
BLOCK = 16
WORKER = b"worker"
START = 1_000_000.0


@dataclass(slots=True, frozen=True)
class Arrival:
    at: float
    tenant: str
    priority: int
    prompt: int  # tokens
    shared: int  # of them a prefix of the tenant's own
    outputs: int
    limit: int  # max_tokens asked for


def trace(requests: int, rate: float, seed: int, long_prompts: float, burst: bool) -> Iterator[Arrival]:
    """Arrivals at ``rate`` a second on average: a quiet stream, and bursts of ten times as many for a tenth of the
    time. Tenant ``flood`` sends half of all, four others share the rest; one in ten is of a higher class, one in ten of
    a lower one. Prompts are log-normal around 200 tokens, ``long_prompts`` of them 8,000 to 32,000."""
    draw = random.Random(seed)
    now = START
    until, fast = START, False
    for _ in range(requests):
        if now >= until:
            fast = not fast
            until = now + draw.expovariate(1.0 / (2.0 if fast else 18.0))
        now += 0.0 if burst else draw.expovariate(rate * (5.0 if fast else 0.55))
        tenant = "flood" if draw.random() < 0.5 else f"t{draw.randrange(4)}"
        priority = draw.choices([-1, 0, 1], [1, 8, 1])[0]
        prompt = min(4000, 1 + int(draw.lognormvariate(5.3, 0.9)))
        if draw.random() < long_prompts:
            prompt = draw.randrange(8000, 32000)
        outputs = min(2000, 1 + int(draw.lognormvariate(4.5, 0.8)))
        limit = outputs if draw.random() < 0.5 else min(4000, 4 * outputs)  # half of them end before their limit
        shared = 0 if draw.random() < 0.5 else 512 if burst else 64
        yield Arrival(now, tenant, priority, prompt + shared, shared, outputs, limit)


class VirtualExecutor:
    """Runs plans one after the other. Its tokens say when a sequence ends: EOS (0) after so many outputs, else 1."""

    def __init__(self, session: bytes, times: StepTimes, slots: int, ends: dict[str, int]) -> None:
        self.session = session
        self.times = times
        self.ends = ends
        self.free_at = 0.0
        self.left = np.zeros(slots, dtype=np.int64)  # known tokens not run yet
        self.to_go = np.zeros(slots, dtype=np.int64)  # outputs until EOS
        self.generation = np.zeros(slots, dtype=np.int32)
        self.busy = 0.0
        self.steps = 0

    def run(self, plan: step.StepPlan, now: float) -> tuple[float, step.StepResult]:
        """When the plan is done, and its answer."""
        for admission in plan.admitted:
            known = (len(admission.prompt) + len(admission.outputs)) // 4
            self.left[admission.slot] = known - admission.computed
            self.to_go[admission.slot] = self.ends[admission.request_id] - len(admission.outputs) // 4
            self.generation[admission.slot] = admission.generation
        slots = unpack_int32(plan.decode)
        prompt_tokens = 0
        if plan.prefill:
            pairs = unpack_int32(plan.prefill).reshape(-1, 2)
            self.left[pairs[:, 0]] -= pairs[:, 1]
            prompt_tokens = int(pairs[:, 1].sum())
            slots = np.concatenate([slots, pairs[:, 0][self.left[pairs[:, 0]] == 0]])
        self.to_go[slots] -= 1
        tokens = (self.to_go[slots] > 0).astype("<i4")
        rows = (len(plan.decode) + len(plan.prefill) // 2) // 4
        seconds = self.times.draw(rows, prompt_tokens) if rows else 0.0
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        self.steps += 1
        result = step.StepResult(
            plan.epoch, plan.seq, plan.digest, pack_int32(slots), self.generation[slots].astype("<u2").tobytes(),
            tokens.tobytes(), round_us=int(1e6 * seconds),
        )  # fmt: skip
        return self.free_at, result


class Simulation:
    def __init__(self, options: argparse.Namespace, config: CoreConfig) -> None:
        self.options = options
        self.core = Core(config, START, incarnation=1)
        self.now = START
        self.ends: dict[str, int] = {}
        self.executors: dict[bytes, VirtualExecutor] = {}
        self.events: list[tuple[float, int, bytes, step.StepResult]] = []
        self.ties = count()
        self.arrivals: list[Arrival] = []
        self.first = np.full(options.requests, np.nan)  # by request: time of its first token
        self.last = np.full(options.requests, np.nan)  # of its newest
        self.over = np.full(options.requests, np.nan)
        self.gaps: list[np.ndarray] = []  # between tokens, a sample
        self.received = 0
        self.refused = 0
        self.cpu = 0.0
        self.longest: list[tuple[float, str]] = []  # the longest turns: processor time, what came in
        self.turns: list[float] = []  # processor seconds
        self.plans = 0
        self.plan_rows = 0

    def run(self) -> dict[str, Any]:
        options, core = self.options, self.core
        card = step.ModelCard("m", "virtual", "a" * 64, "b" * 64, VOCAB, 65536, (0,), ())
        limits = step.Limits(options.kv_blocks, BLOCK, options.slots, options.batch_tokens)
        core.on_front(WORKER, front.Attach(front.FRONT_VERSION, "worker", 1, 1 << 28), self.now)
        for i in range(options.executors):
            times = StepTimes(options.step_ms / 1e3, options.row_us / 1e6, options.token_us / 1e6, options.jitter, i)
            session = f"executor-{i}".encode()
            self.executors[session] = VirtualExecutor(session, times, options.slots, self.ends)
            hello = step.Hello(step.PROTOCOL_VERSIONS, f"e{i}", i, card, limits)
            core.on_executor(session, hello, self.now)
        self.turn(0.0, "the start")
        garbage.take_over()
        started = time.process_time()
        source = trace(options.requests, options.rate, options.seed, options.long_prompts, options.burst)
        following = next(source, None)
        while following is not None or self.events or core.streams.by_key:
            times_ahead = [self.events[0][0]] if self.events else []
            if following is not None:
                times_ahead.append(following.at)
            deadline = core.next_deadline()
            if deadline is not None:
                times_ahead.append(max(deadline, self.now + 1e-6))
            self.now = max(self.now, min(times_ahead))
            # What comes within a tenth of a millisecond is met in one turn, as by the real loop.
            until = self.now + 1e-4
            results: list[tuple[bytes, step.StepResult]] = []
            submits: list[front.Submit] = []
            while self.events and self.events[0][0] <= until:
                results.append(heapq.heappop(self.events)[2:])
            while following is not None and following.at <= until and len(submits) < WORKER_FRAMES_A_TURN:
                submits.append(self.submit(following))
                following = next(source, None)
            tick = deadline is not None and deadline <= self.now
            began = time.process_time()
            for session, result in results:
                core.on_executor(session, result, self.now)
            for submit in submits:
                core.on_front(WORKER, submit, self.now)
            if tick:
                core.on_tick(self.now)
            self.turn(began, f"{len(results)} results, {len(submits)} requests{', a tick' if tick else ''}")
        return self.report(time.process_time() - started)

    def submit(self, arrival: Arrival) -> front.Submit:
        number = len(self.arrivals)
        self.arrivals.append(arrival)
        name = f"r{number}"
        self.ends[name] = arrival.outputs
        shared = min(arrival.shared, arrival.prompt - 1)
        prompt = np.full(arrival.prompt, 2 + number % (VOCAB - 2), dtype="<i4")
        prompt[:shared] = 1
        hashes = block_hashes("a" * 64, arrival.tenant, prompt[: shared + BLOCK], BLOCK) if shared else b""
        if shared:  # blocks past the shared ones are this request's own: any unique hash will do
            own = arrival.prompt // BLOCK - len(hashes) // 16
            salt = number.to_bytes(8, "little")
            hashes += b"".join(salt + i.to_bytes(8, "little") for i in range(own))
        return front.Submit(
            stream=number, request_id=name, model="m", prompt=prompt.tobytes(), choices=(front.Choice(0),),
            sampling=step.SamplingParams(), max_tokens=arrival.limit, tenant=arrival.tenant,
            priority=arrival.priority, arrival=arrival.at, block_hashes=hashes,
        )  # fmt: skip

    def turn(self, began: float, what: str) -> None:
        advanced = time.process_time()
        self.core.advance(self.now)
        items = self.core.take_outbox()
        ended = time.process_time()
        spent = ended - (began or advanced)
        self.cpu += spent
        self.turns.append(spent)
        if len(self.longest) < 8 or spent > self.longest[0][0]:
            waiting = len(self.core.fleet.models["m"].queue)
            what += f"; {waiting} waiting, {1e3 * (ended - advanced):.1f} ms of it for plans"
            (heapq.heappushpop if len(self.longest) == 8 else heapq.heappush)(self.longest, (spent, what))
        for destination, message in items:
            if destination.kind == EXECUTOR:
                if isinstance(message, step.StepPlan):
                    self.plans += 1
                    self.plan_rows += len(message.decode) // 4
                    done, result = self.executors[destination.peer].run(message, self.now)
                    heapq.heappush(self.events, (done, next(self.ties), destination.peer, result))
            elif isinstance(message, front.Tokens):
                self.on_tokens(unpack_int32(message.streams))
            elif isinstance(message, front.Finished):
                self.over[message.stream] = self.now
            elif isinstance(message, front.Failed | front.Rejected):
                self.refused += 1
        if self.received > (1 << 26):
            self.core.on_front(WORKER, front.Credit(self.core.workers.by_peer[WORKER].sent), self.now)
            self.received = 0

    def on_tokens(self, streams: np.ndarray) -> None:
        self.received += len(streams)
        before = self.last[streams]
        fresh = np.isnan(before)
        self.first[streams[fresh]] = self.now
        if self.plans % 7 == 0:  # a sample is enough
            self.gaps.append((self.now - before[~fresh]).astype(np.float32))
        self.last[streams] = self.now

    def report(self, cpu: float) -> dict[str, Any]:
        core, options = self.core, self.options
        arrived = np.array([arrival.at for arrival in self.arrivals])
        ttft = self.first - arrived
        gaps = np.concatenate(self.gaps) if self.gaps else np.zeros(1)
        took = self.now - START
        groups: dict[str, list[int]] = defaultdict(list)
        kinds: Counter[str] = Counter()
        for i, arrival in enumerate(self.arrivals):
            kinds[arrival.tenant] += 1
            groups[f"class {arrival.priority}"].append(i)
            groups["tenant flood" if arrival.tenant == "flood" else "other tenants"].append(i)
            groups["prompts over 8,000" if arrival.prompt >= 8000 else "other prompts"].append(i)
        busy = sum(executor.busy for executor in self.executors.values())
        return {
            "options": {k: v for k, v in vars(options).items() if k != "json"},
            "virtual_seconds": round(took, 1),
            "requests": len(self.arrivals),
            "finished": int(np.count_nonzero(~np.isnan(self.over))),
            "refused_or_failed": self.refused,
            "tokens": core.committer.tokens,
            "steps": sum(executor.steps for executor in self.executors.values()),
            "rows_a_step": round(self.plan_rows / max(self.plans, 1), 1),
            "devices_busy": round(busy / took / options.executors, 3),
            "ttft": {name: quantiles(ttft[members]) for name, members in sorted(groups.items())},
            "itl": quantiles(gaps),
            "preemptions": core.residency.preemptions,
            "prefix_hit_blocks": core.residency.prefix_hits,
            "core_cpu_seconds": round(self.cpu, 1),
            "core_cpu_us_a_plan": round(1e6 * self.cpu / max(self.plans, 1), 1),
            "turn_ms": quantiles(1e3 * np.array(self.turns)),
            "longest_turns": [f"{1e3 * spent:.1f} ms: {what}" for spent, what in sorted(self.longest, reverse=True)],
            "core_share_of_real_time": round(self.cpu / took, 3),
            "cpu_seconds_of_the_run": round(cpu, 1),
            "largest_tenant_requests": max(kinds.values()),
        }


def quantiles(values: np.ndarray) -> dict[str, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {}
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return {"p50": round(float(p50), 4), "p90": round(float(p90), 4), "p99": round(float(p99), 4),
            "max": round(float(values.max()), 3)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--executors", type=int, default=8)
    add("--slots", type=int, default=512)
    add("--requests", type=int, default=100_000)
    add("--rate", type=float, default=1500.0, help="arrivals a second, of virtual time")
    add("--burst", action="store_true", help="all requests at once; half of each tenant's share 512 tokens")
    add("--seed", type=int, default=1)
    add("--kv-blocks", type=int, default=16384)
    add("--batch-tokens", type=int, default=8192)
    add("--long-prompts", type=float, default=0.002, help="share of prompts of 8,000 to 32,000 tokens")
    add("--step-ms", type=float, default=5.0)
    add("--row-us", type=float, default=20.0)
    add("--token-us", type=float, default=10.0)
    add("--jitter", type=float, default=0.1)
    add("--kv-overcommit", type=float, default=CoreConfig().kv_overcommit)
    add("--itl-target", type=float, default=CoreConfig().itl_target)
    add("--fair-window", type=float, default=CoreConfig().fair_window)
    add("--fair-tokens", type=int, default=CoreConfig().fair_tokens)
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    config = CoreConfig(
        max_waiting=options.requests + 1,
        max_executors=max(256, options.executors),
        kv_overcommit=options.kv_overcommit,
        itl_target=options.itl_target,
        fair_window=options.fair_window,
        fair_tokens=options.fair_tokens,
    )
    result = Simulation(options, config).run()
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
