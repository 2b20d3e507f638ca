"""What a run in virtual time (virtual_time.py) comes to: the figures that policy and cost are judged by."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler_svc.core.core import Core

if TYPE_CHECKING:
    from bench.virtual_time import Seen, VirtualExecutor

BLOCK = 16


def report(
    options: argparse.Namespace,
    core: Core,
    seen: Seen,
    executors: list[VirtualExecutor],
    took: float,
    started: float,
) -> dict[str, Any]:
    """``took``: seconds of virtual time; ``started``: the processor time at which the run began."""
    arrived = np.array([arrival.at for arrival in seen.arrivals])
    groups: dict[str, list[int]] = defaultdict(list)
    for i, arrival in enumerate(seen.arrivals):
        groups[f"class {arrival.priority}"].append(i)
        groups["tenant flood" if arrival.tenant == "flood" else "other tenants"].append(i)
        groups["prompts over 8,000" if arrival.prompt >= 8000 else "other prompts"].append(i)
    turns = 1e3 * np.array(seen.turns)
    cpu = sum(seen.cpu.values())
    steps = sum(executor.steps for executor in executors)
    return {
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "virtual_seconds": round(took, 1),
        "requests": len(seen.arrivals),
        "finished": int(np.count_nonzero(~np.isnan(seen.over))),
        "refused_or_failed": seen.refused,
        "tokens": core.committer.tokens,
        "steps": steps,
        "rows_a_step": round(seen.rows / max(seen.plans, 1), 1),
        "deaths": seen.deaths,
        "preemptions": core.residency.preemptions,
        "queue_wait": {name: quantiles((seen.admitted - arrived)[of]) for name, of in sorted(groups.items())},
        "first_token": {name: quantiles((seen.first - arrived)[of]) for name, of in sorted(groups.items())},
        "between_tokens": quantiles(np.concatenate(seen.gaps) if seen.gaps else np.zeros(1)),
        "fairness": _fairness(core, seen),
        "passed_over": _passed_over(core, seen, arrived),
        "prefix": _prefix(seen),
        "balance": _balance(seen, executors, took),
        "core": {
            "cpu_seconds": round(cpu, 1),
            "share_of_virtual_time": round(cpu / took, 3),
            "us_a_step": round(1e6 * cpu / max(steps, 1), 1),
            "us_a_result": round(1e6 * seen.cpu["results"] / max(steps, 1), 1),
            "us_a_plan": round(1e6 * seen.cpu["plans"] / max(seen.plans, 1), 1),
            "us_an_arrival": round(1e6 * seen.cpu["arrivals"] / max(len(seen.arrivals), 1), 1),
            "other_seconds": round(seen.cpu["other"], 1),
            "turns": len(turns),
            "turn_ms": quantiles(turns),
            "turns_over_5_ms": int(np.count_nonzero(turns > 5.0)),
            "longest_turns": [f"{1e3 * spent:.1f} ms: {what}" for spent, what in sorted(seen.longest, reverse=True)],
        },
        "cpu_seconds_of_the_run": round(time.process_time() - started, 1),
    }


def _fairness(core: Core, seen: Seen) -> dict[str, Any]:
    """The difference of service between the tenants that waited, in tokens, at every look."""
    spreads = np.array(seen.spreads) if seen.spreads else np.zeros(1)
    return {"looks": len(seen.spreads), "fair_tokens": core.config.fair_tokens, "difference": quantiles(spreads)}


def _passed_over(core: Core, seen: Seen, arrived: np.ndarray) -> dict[str, Any]:
    """Requests that waited while others with a later key (aged arrival time) were admitted: within a tenant, by how
    many; between tenants, by how many seconds of aged arrival time at most."""
    order = np.array(seen.order)
    keys = arrived + core.config.ageing * np.array([arrival.priority for arrival in seen.arrivals])
    tenants = np.array([arrival.tenant for arrival in seen.arrivals])
    counts = [
        _overtaken(arrived[mine], seen.admitted[mine], keys[mine])[0]
        for mine in (order[tenants[order] == tenant] for tenant in np.unique(tenants))
    ]
    return {
        "within_a_tenant_by_requests": quantiles(np.concatenate(counts)),
        "between_tenants_by_seconds": quantiles(_overtaken(arrived[order], seen.admitted[order], keys[order])[1]),
        "bound_between_tenants": core.config.fair_window,
    }


def _overtaken(arrived: np.ndarray, admitted: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each request, in order of admission: (how many with a later key were admitted while it waited, the latest of
    those keys less its own)."""
    first = np.searchsorted(admitted, arrived)
    counts, by = np.zeros(len(keys)), np.zeros(len(keys))
    for i, start in enumerate(first.tolist()):
        later = keys[start:i] - keys[i]
        if len(later) and (most := float(later.max())) > 0.0:
            counts[i], by[i] = np.count_nonzero(later > 0.0), most
    return counts, by


def _prefix(seen: Seen) -> dict[str, Any]:
    """Blocks found against the most that could be: all but the first request of each tenant's prefix find it."""
    best = 0
    known: set[str] = set()
    for arrival in seen.arrivals:
        blocks = min(arrival.shared, arrival.prompt - 1) // BLOCK
        best += blocks if arrival.tenant in known else 0
        if blocks:
            known.add(arrival.tenant)
    return {"blocks_found": seen.found, "best_possible": best, "share": round(seen.found / max(best, 1), 3)}


def _balance(seen: Seen, executors: list[VirtualExecutor], took: float) -> dict[str, Any]:
    """Over executors: how busy each was, and at each look the deviation of slots used from their mean."""
    busy = np.array([executor.busy for executor in executors]) / took
    loads = np.array([deviation / mean for mean, deviation in seen.loads if mean >= 1.0] or [0.0])
    return {
        "busy_mean": round(float(busy.mean()), 3),
        "busy_least": round(float(busy.min()), 3),
        "busy_most": round(float(busy.max()), 3),
        "slots_used_mean": round(float(np.mean([mean for mean, _ in seen.loads] or [0.0])), 1),
        "slots_used_deviation": quantiles(loads),
    }


def quantiles(values: np.ndarray) -> dict[str, float]:
    values = values[~np.isnan(values)]
    if not len(values):
        return {}
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return {"p50": round(float(p50), 4), "p90": round(float(p90), 4), "p99": round(float(p99), 4),
            "max": round(float(values.max()), 3)}  # fmt: skip
