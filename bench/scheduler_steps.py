"""What a step of the scheduler core costs, beside vLLM's scheduler in the same run.

    python -m bench.scheduler_steps [--running 1,64,256,1024,4096] [--steps 60] [--rounds 3]
        [--core compiled|interpreted] [--peer-python PATH] [--json FILE] [--long-prompts 8]

Ours is the whole core path: the result's frame decoded and committed, requests that arrive decoded and queued, the plan
made and encoded, the digest, the token batches for the API workers encoded. The peer's is ``schedule()`` and
``update_from_output()`` (and ``add_request()`` under churn) and nothing of its encoding. Both are processor time of the
one thread; slices of steps alternate between the two, and the table gives medians over all steps (``min`` the least).

Churn: 1 % of the running requests end and as many arrive, in each step. Prompts have 113 to 128 tokens. Last comes the
longest turn of the core while prompts of 131,072 tokens arrive among 256 decoding sequences: new ones, then the same
ones again (found in the prefix cache), then cancelled ones.

The core is the compiled one, as in the scheduler's image (built by ``make compiled``'s command where that was not done
for these sources; it takes a minute), or with ``--core interpreted`` the one that runs without any C compiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.allocations import AllocationCounter
from bench.core_rig import BLOCK, CoreRig, TurnCost
from deploy.compile_core import ROOT, compile_core, environment, has_compiler
from scheduler_svc.core import kind

CONTEXT, PROMPT, BUDGET = 2048, 128, 16384
LIFE, STEADY_LIFE = 100, 1900  # outputs
LONG_PROMPT, LONG_CONTEXT, LONG_BUDGET = 131072, 139264, 8192

# The targets of this bench.
PLAN_BYTES_A_ROW, RESULT_BYTES_A_ROW, LONGEST_TURN_MS = 6.0, 12.0, 5.0
AT_LEAST = {("steady", 256): 40.0, ("steady", 1024): 100.0, ("churn", 1024): 30.0}


class Ours:
    """The core with ``running`` sequences, in steady decode or under churn."""

    def __init__(self, running: int, churn: bool) -> None:
        spare = running // 50 + 2
        self.rig = CoreRig(running + spare, (running + spare) * (CONTEXT // BLOCK), CONTEXT, BUDGET, max_waiting=65536)
        self.arrivals = max(1, running // 100) if churn else 0
        every = running // self.arrivals if churn else 1
        for i in range(running):
            # Under churn the first ends are spread as evenly as later ones.
            self.submit(1 + i // self.arrivals % every if churn else STEADY_LIFE)
        self.rig.settle()

    def submit(self, outputs: int) -> None:
        self.rig.submit(self.rig.prompt(PROMPT - self.rig.streams % BLOCK), outputs)

    def step(self, around: AllocationCounter | None = None) -> TurnCost:
        for _ in range(self.arrivals):
            self.submit(LIFE)
        return self.rig.turn(around)

    def allocations(self, steps: int = 20) -> float:
        """Of one step of the core, on average."""
        counter = AllocationCounter()
        for _ in range(steps):
            self.step(counter)
        return counter.total / steps


class Peer:
    """``peers/vllm_scheduler.py`` in an interpreter of its own."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).parent / "peers" / "vllm_scheduler.py"
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def steps(self, running: int, churn: bool, count: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"running": running, "churn": churn, "steps": count}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended with status {self._process.wait()}; run it by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(running: int, churn: bool, steps: int, rounds: int, peer: Peer | None, peer_steps: int) -> dict[str, Any]:
    """One line of the table."""
    ours = Ours(running, churn)
    if peer is not None:
        peer.steps(running, churn, 2)
    costs: list[TurnCost] = []
    theirs: dict[str, Any] = {"us": []}
    for _ in range(rounds):
        gc.collect()
        for _ in range(20):  # a slice starts with cold caches
            ours.step()
        costs += [ours.step() for _ in range(steps)]
        if peer is not None:
            answer = peer.steps(running, churn, peer_steps)
            theirs = {**answer, "us": theirs["us"] + answer["us"]}
    if not churn:
        decoding = [cost.decode_rows for cost in costs]
        assert min(decoding) == running, f"{min(decoding)} of {running} rows ran"
    us = [cost.cpu * 1e6 for cost in costs]
    rows = running
    line: dict[str, Any] = {
        "running": running,
        "load": "churn" if churn else "steady",
        "us": statistics.median(us),
        "us_min": min(us),
        "us_p99": statistics.quantiles(us, n=100)[98] if len(us) > 1 else us[0],
        "plan_bytes_a_row": statistics.mean(cost.plan_bytes for cost in costs) / rows,
        "result_bytes_a_row": statistics.mean(cost.result_bytes for cost in costs) / rows,
        "token_batch_bytes_a_row": statistics.mean(cost.token_bytes for cost in costs) / rows,
        "allocations": ours.allocations(),
    }
    if theirs["us"]:
        line["peer_us"] = statistics.median(theirs["us"])
        line["peer_us_min"] = min(theirs["us"])
        line["peer_version"] = theirs["version"]
        line["ratio"] = line["peer_us"] / line["us"]
        line["ratio_min"] = line["peer_us_min"] / line["us_min"]
    return line


def long_prompts(prompts: int, decoding: int = 256) -> list[dict[str, Any]]:
    """The longest turn while prompts of 128k tokens arrive among ``decoding`` sequences."""
    blocks = 6 * LONG_CONTEXT // BLOCK + decoding * (CONTEXT // BLOCK)
    rig = CoreRig(decoding + 16, blocks, LONG_CONTEXT, LONG_BUDGET)
    for _ in range(decoding):
        rig.submit(rig.prompt(PROMPT), 10_000)
    rig.settle()
    texts = [rig.prompt(LONG_PROMPT) for _ in range(prompts)]
    gc.collect()

    def worst(turns: list[TurnCost], what: str) -> dict[str, Any]:
        return {
            "arriving": what,
            "turns": len(turns),
            "longest_cpu_ms": max(cost.cpu for cost in turns) * 1e3,
            "longest_wall_ms": max(cost.wall for cost in turns) * 1e3,
            "median_cpu_ms": statistics.median(cost.cpu for cost in turns) * 1e3,
        }

    results = [worst([rig.turn() for _ in range(200)], "nothing")]
    turns = []
    for text in texts:
        rig.submit(text, 16)
        turns += [rig.turn() for _ in range(40)]
    results.append(worst(turns, "new prompts of 131,072 tokens; from the 6th on blocks of others are evicted"))
    turns = []
    for text in [texts[-1]] * prompts:
        rig.submit(text, 16)
        turns += [rig.turn() for _ in range(30)]
    results.append(worst(turns, "one of them again and again: found in the prefix cache"))
    turns = []
    for _ in range(prompts):
        rig.submit(rig.prompt(LONG_PROMPT), 16)
        turns += [rig.turn() for _ in range(6)]
        rig.cancel(rig.streams)
        turns += [rig.turn() for _ in range(10)]
    results.append(worst(turns, "new ones, cancelled while their prompts run"))
    return results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="1,64,256,1024,4096", help="numbers of running sequences")
    parser.add_argument("--steps", type=int, default=60, help="steps of ours in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", choices=("compiled", "interpreted"), default="compiled")
    parser.add_argument("--peer-python", metavar="PATH", help="an interpreter that has vLLM")
    parser.add_argument("--peer-steps", type=int, default=20, help="steps of the peer in a round")
    parser.add_argument("--long-prompts", type=int, default=8, help="prompts of 128k tokens (0: skip that part)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def become_compiled() -> None:
    """This bench once more, in the place of this process, with the compiled core."""
    if not has_compiler():
        raise SystemExit("error: a C compiler is needed (cc, gcc or clang), or --core interpreted")
    folder = ROOT / "build" / "compiled"
    compile_core(folder)
    os.execve(sys.executable, [sys.executable, "-m", "bench.scheduler_steps", *sys.argv[1:]], environment(folder))


def main() -> None:
    args = parse_args()
    if args.core != kind():
        if kind() == "compiled":
            raise SystemExit("error: PYTHONPATH names the compiled core, not the interpreted one")
        become_compiled()
    peer = Peer(args.peer_python) if args.peer_python else None
    lines = []
    print(f"core: {kind()}")
    print(f"{'running':>8} {'load':>7} {'us':>8} {'min':>8} {'p99':>8} {'peer us':>9} {'ratio':>7} {'plan B/row':>11} "
          f"{'result B/row':>13} {'batch B/row':>12} {'allocations':>12}")  # fmt: skip
    for running in [int(part) for part in args.running.split(",")]:
        for churn in (False, True):
            line = measure(running, churn, args.steps, args.rounds, peer, args.peer_steps)
            lines.append(line)
            peer_us, ratio = line.get("peer_us", float("nan")), line.get("ratio", float("nan"))
            print(f"{running:>8} {line['load']:>7} {line['us']:>8.1f} {line['us_min']:>8.1f} {line['us_p99']:>8.1f} "
                  f"{peer_us:>9.0f} {ratio:>7.1f} {line['plan_bytes_a_row']:>11.2f} "
                  f"{line['result_bytes_a_row']:>13.2f} {line['token_batch_bytes_a_row']:>12.2f} "
                  f"{line['allocations']:>12.0f}", flush=True)  # fmt: skip
    if peer is not None:
        peer.close()
    turns = long_prompts(args.long_prompts) if args.long_prompts else []
    for turn in turns:
        print(f"longest turn {turn['longest_cpu_ms']:.2f} ms ({turn['longest_wall_ms']:.2f} wall, median "
              f"{turn['median_cpu_ms']:.3f}): {turn['arriving']}")  # fmt: skip
    verdicts = _verdicts(lines, turns)
    for text, reached in verdicts:
        print(f"{'reached' if reached else 'MISSED '}  {text}")
    if args.json:
        body = {
            "core": kind(),
            "steps": lines,
            "long_prompts": turns,
            "targets": [{"text": t, "reached": r} for t, r in verdicts],
        }
        args.json.write_text(json.dumps(body, indent=1) + "\n")


def _verdicts(lines: list[dict[str, Any]], turns: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    at = {(line["load"], line["running"]): line for line in lines}
    verdicts = []
    for key, least in AT_LEAST.items():
        if "ratio" in at.get(key, {}):
            ratio = at[key]["ratio"]
            verdicts.append((f"{key[0]} at {key[1]}: {ratio:.1f} times less than the peer (at least {least:g})",
                             ratio >= least))  # fmt: skip
    if ("steady", 1024) in at and ("steady", 4096) in at:
        growth = at["steady", 4096]["us"] / at["steady", 1024]["us"]
        verdicts.append((f"4,096 costs {growth:.2f} times 1,024 (at most 3)", growth <= 3.0))
    for (load, running), line in at.items():
        if load == "steady" and running >= 256:
            plan, result = line["plan_bytes_a_row"], line["result_bytes_a_row"]
            verdicts.append((f"link at {running}: {plan:.2f} bytes a plan row (at most 6), {result:.2f} a result row "
                             "(at most 12)", plan <= PLAN_BYTES_A_ROW and result <= RESULT_BYTES_A_ROW))  # fmt: skip
    if turns:
        longest = max(turn["longest_cpu_ms"] for turn in turns)
        verdicts.append((f"longest turn {longest:.2f} ms (at most {LONGEST_TURN_MS:g})", longest <= LONGEST_TURN_MS))
    return verdicts


if __name__ == "__main__":
    main()
