"""``python -m tests.core.campaign --events 2000000 --seed 1000 --json FILE``: the driver for as long as it takes.

Worlds of 1,000 driver events each, one seed a world, until the core has had ``--events`` events in all (every message
or tick that reaches it is one, and all invariants are checked after each). A seed that fails is named, with its error,
and the campaign goes on, to 20 of them; the exit status is then 1. ``--only SEED`` runs one world again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.core.driver import driver_of

EVENTS_A_WORLD = 1000
MOST_FAILURES = 20  # then it ends: what fails everywhere may never make events


def run_world(seed: int, events: int, totals: Counter[str]) -> None:
    driver = driver_of(seed)
    try:
        for _ in range(events):
            driver.event()
        driver.finish()
        driver.check()
    finally:
        world = driver.world
        totals["events"] += world.events
        totals["plans"] += sum(len(executor.plans) for executor in driver.homes)
        totals["rows"] += sum(executor.rows for executor in driver.homes)
        totals["prefill_tokens"] += sum(executor.prefill_tokens for executor in driver.homes)
        totals["requests"] += sum(len(worker.submits) for worker in driver.workers)
        totals["preemptions"] += world.core.residency.preemptions
        totals["prefix_hit_blocks"] += world.core.residency.prefix_hits
        totals["tokens"] += world.core.committer.tokens
        totals["dropped_rows"] += world.core.committer.dropped_rows
        totals.update({f"core.{name}": count for name, count in world.core.counters.items()})
        totals.update({f"event.{name}": count for name, count in driver.done.items()})
        totals["worlds"] += 1


def campaign(events: int, first_seed: int, seconds: float, report: Path | None) -> dict[str, Any]:
    totals: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    started, cpu, seed = time.monotonic(), time.process_time(), first_seed

    def state() -> dict[str, Any]:
        return {
            "first_seed": first_seed,
            "last_seed": seed - 1,
            "failures": failures,
            "seconds": round(time.monotonic() - started, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "totals": dict(sorted(totals.items())),
        }

    while totals["events"] < events and time.monotonic() - started < seconds and len(failures) < MOST_FAILURES:
        try:
            run_world(seed, EVENTS_A_WORLD, totals)
        except Exception as error:  # a finding: named, and the campaign goes on
            where = traceback.format_exc(limit=-3)
            failures.append({"seed": seed, "error": f"{type(error).__name__}: {error}"[:2000], "where": where[-3000:]})
            print(f"seed {seed}: {type(error).__name__}: {error}"[:2000], file=sys.stderr, flush=True)
        seed += 1
        if report is not None and (seed - first_seed) % 20 == 0:
            report.write_text(json.dumps(state(), indent=1) + "\n")
    if report is not None:
        report.write_text(json.dumps(state(), indent=1) + "\n")
    return state()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--events", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1000, help="of the first world (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", type=int, metavar="SEED", help="one world, with its traceback")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # lost epochs are daily life here
    if options.only is not None:
        run_world(options.only, EVENTS_A_WORLD, Counter())
        return 0
    result = campaign(options.events, options.seed, options.seconds, options.json)
    print(json.dumps({key: value for key, value in result.items() if key != "failures"}))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
