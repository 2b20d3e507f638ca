"""``python -m bench.virtual_time``: the real scheduler core under a day's traffic, in virtual time.

No socket and no waiting: executors are a step-time model (a step, a row, a prompt token, log-normal jitter) on an
event queue, arrivals come from a trace (bursts, tenants, classes, long prompts), and the clock jumps from event to
event. What comes out is what clients would see: the wait in the queue, time to the first token, time between tokens, by
class and by tenant; how well the rules were kept: fair shares, being passed over, prefixes found, balance; and what the
core had to do for it: its own processor time a step and an arrival, and its longest turns (virtual_report.py).

    --executors 8 --slots 512 --requests 100000     sizes that no test machine has
    --executors 1000 --requests 100000 --rate 30000 --long-prompts 0.0005
                                                    where one core ends: its processor time against the devices'
    --kill-every 5                                  an executor dies every 5 s, another takes its place
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from bench.virtual_report import report
from executor_svc.simulate_model import StepTimes
from protos import front, step
from protos.wire import pack_int32, unpack_int32
from scheduler_svc.core import garbage
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.loop import EXECUTOR_FRAMES_A_TURN, WORKER_FRAMES_A_TURN
from scheduler_svc.core.outbox import EXECUTOR, Destination, Message
from scheduler_svc.prefix_hash import block_hashes

VOCAB = 32000
SAMPLE = 0.25  # seconds of virtual time between two looks at shares and balance
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


@dataclass
class Seen:
    """What a run is judged by (virtual_report.py). Arrays are by request: seconds of virtual time, NaN for never."""

    arrivals: list[Arrival]
    admitted: np.ndarray  # first admission
    first: np.ndarray  # first token
    last: np.ndarray  # newest token
    over: np.ndarray
    order: list[int] = field(default_factory=list)  # requests, as they were first admitted
    found: int = 0  # blocks of prefixes, at first admissions
    gaps: list[np.ndarray] = field(default_factory=list)  # between tokens, a sample
    refused: int = 0
    plans: int = 0
    rows: int = 0
    deaths: int = 0
    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("results", "arrivals", "plans", "other"), 0.0))
    turns: list[float] = field(default_factory=list)  # processor seconds
    longest: list[tuple[float, str]] = field(default_factory=list)  # processor seconds, what the turn was
    spreads: list[float] = field(default_factory=list)  # tokens served, most less least of the tenants that waited
    loads: list[tuple[float, float]] = field(default_factory=list)  # slots used: mean and deviation over executors


class Simulation:
    def __init__(self, options: argparse.Namespace, config: CoreConfig) -> None:
        self.options = options
        self.core = Core(config, START, incarnation=1)
        self.now = START
        self.ends: dict[str, int] = {}
        self.executors: dict[bytes, VirtualExecutor] = {}
        self.gone: list[VirtualExecutor] = []
        self.events: list[tuple[float, int, bytes, step.StepResult]] = []
        self.ties = count()
        never = np.full(options.requests, np.nan)
        self.seen = Seen([], never.copy(), never.copy(), never.copy(), never.copy())
        self.received = 0
        self.joined = 0
        self.next_sample = START + SAMPLE
        self.next_death = START + options.kill_every if options.kill_every else float("inf")
        self.draw = random.Random(options.seed)

    def join(self) -> None:
        options, i = self.options, self.joined
        self.joined += 1
        card = step.ModelCard("m", "virtual", "a" * 64, "b" * 64, VOCAB, 65536, (0,), ())
        limits = step.Limits(options.kv_blocks, BLOCK, options.slots, options.batch_tokens)
        times = StepTimes(options.step_ms / 1e3, options.row_us / 1e6, options.token_us / 1e6, options.jitter, i)
        session = f"executor-{i}".encode()
        self.executors[session] = VirtualExecutor(session, times, options.slots, self.ends)
        self.core.on_executor(session, step.Hello(step.PROTOCOL_VERSIONS, f"e{i}", i, card, limits), self.now)

    def run(self) -> dict[str, Any]:
        options, core, seen = self.options, self.core, self.seen
        core.on_front(WORKER, front.Attach(front.FRONT_VERSION, "worker", 1, 1 << 28), self.now)
        for _ in range(options.executors):
            self.join()
        self.turn(time.process_time(), [], [], False)
        garbage.take_over()
        seen.turns.clear()
        seen.longest.clear()
        seen.cpu = dict.fromkeys(seen.cpu, 0.0)
        started = time.process_time()
        source = trace(options.requests, options.rate, options.seed, options.long_prompts, options.burst)
        following = next(source, None)
        while following is not None or self.events or core.streams.by_request:
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
            while self.events and self.events[0][0] <= until and len(results) < EXECUTOR_FRAMES_A_TURN:
                session, result = heapq.heappop(self.events)[2:]
                if session in self.executors:
                    results.append((session, result))
            while following is not None and following.at <= until and len(submits) < WORKER_FRAMES_A_TURN:
                submits.append(self.submit(following))
                following = next(source, None)
            self.turn(time.process_time(), results, submits, deadline is not None and deadline <= self.now)
            if self.now >= self.next_sample:
                self.sample()
        return report(self.options, core, seen, [*self.executors.values(), *self.gone], self.now - START, started)

    def sample(self) -> None:
        self.next_sample = self.now + SAMPLE
        entry = self.core.fleet.models["m"]
        served = [entry.queue.shares.served(tenant) for tenant in entry.queue.tokens]
        if len(served) > 1:
            self.seen.spreads.append(max(served) - min(served))
        used = np.array([executor.table.used for executor in entry.executors])
        self.seen.loads.append((float(used.mean()), float(used.std())))

    def submit(self, arrival: Arrival) -> front.Submit:
        number = len(self.seen.arrivals)
        self.seen.arrivals.append(arrival)
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

    def turn(
        self, began: float, results: list[tuple[bytes, step.StepResult]], submits: list[front.Submit], tick: bool
    ) -> None:
        core, now, seen = self.core, self.now, self.seen
        died = None
        if now >= self.next_death:
            self.next_death = now + self.options.kill_every
            died = self.draw.choice(list(self.executors))
            self.gone.append(self.executors.pop(died))
            core.on_session_gone(died, now)
            seen.deaths += 1
        if len(self.executors) < self.options.executors and died is None:
            self.join()
        clock = [began, time.process_time()]
        for session, result in results:
            if session != died:
                core.on_executor(session, result, now)
        clock.append(time.process_time())
        for submit in submits:
            core.on_front(WORKER, submit, now)
        clock.append(time.process_time())
        if tick:
            core.on_tick(now)
        clock.append(time.process_time())
        core.advance(now)
        items = core.take_outbox()
        clock.append(time.process_time())
        other, of_results, of_arrivals, of_tick, of_plans = np.diff(clock)
        for name, spent in (("results", of_results), ("arrivals", of_arrivals), ("plans", of_plans)):
            seen.cpu[name] += spent
        seen.cpu["other"] += other + of_tick
        plans, admitted = self.deliver(items)
        self.note(clock[-1] - began, clock, (len(results), len(submits), plans, admitted, died is not None))

    def note(self, spent: float, clock: list[float], what: tuple[int, int, int, int, bool]) -> None:
        """Keep the longest turns, each with its parts."""
        longest = self.seen.longest
        self.seen.turns.append(spent)
        if len(longest) == 8 and spent <= longest[0][0]:
            return
        before, results, arrivals, tick, plans = 1e3 * np.diff(clock)
        text = f"{what[0]} results {results:.1f} ms, {what[1]} requests {arrivals:.1f} ms, {what[2]} plans with "
        text += f"{what[3]} admissions {plans:.1f} ms, tick {tick:.1f} ms"
        text += f", a death {before:.1f} ms" if what[4] else ""
        text += f"; {len(self.core.fleet.models['m'].queue)} waiting"
        (heapq.heappushpop if len(longest) == 8 else heapq.heappush)(longest, (spent, text))

    def deliver(self, items: list[tuple[Destination, Message]]) -> tuple[int, int]:
        """Returns (plans, admissions)."""
        seen, plans, admitted = self.seen, 0, 0
        for destination, message in items:
            if destination.kind == EXECUTOR:
                if isinstance(message, step.StepPlan) and destination.peer in self.executors:
                    plans += 1
                    admitted += len(message.admitted)
                    self.plan(destination.peer, message)
            elif isinstance(message, front.Tokens):
                self.on_tokens(unpack_int32(message.streams))
            elif isinstance(message, front.Finished):
                seen.over[message.stream] = self.now
            elif isinstance(message, front.Failed | front.Rejected):
                seen.refused += 1
        if self.received > (1 << 26):
            self.core.on_front(WORKER, front.Credit(self.core.workers.by_peer[WORKER].sent), self.now)
            self.received = 0
        return plans, admitted

    def plan(self, session: bytes, plan: step.StepPlan) -> None:
        seen = self.seen
        seen.plans += 1
        seen.rows += len(plan.decode) // 4
        for admission in plan.admitted:
            number = int(admission.request_id[1:])
            if np.isnan(seen.admitted[number]):
                seen.admitted[number] = self.now
                seen.order.append(number)
                seen.found += admission.computed // BLOCK
        done, result = self.executors[session].run(plan, self.now)
        heapq.heappush(self.events, (done, next(self.ties), session, result))

    def on_tokens(self, streams: np.ndarray) -> None:
        seen = self.seen
        self.received += len(streams)
        before = seen.last[streams]
        fresh = np.isnan(before)
        seen.first[streams[fresh]] = self.now
        if seen.plans % 7 == 0:  # a sample is enough
            seen.gaps.append((self.now - before[~fresh]).astype(np.float32))
        seen.last[streams] = self.now


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
    add("--kill-every", type=float, default=0.0, help="seconds between deaths of executors (0: none)")
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
