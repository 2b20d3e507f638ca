"""Records -> the figures of the field, a dictionary for JSON and a table for people.

TTFT   first token - sent                      TPOT   (last token - first token) / (output tokens - 1)
ITL    gap between consecutive messages        E2EL   last token - sent
Several tokens may ride in one message; ``tokens_per_message`` says how many did, so ITL can be read right.
Throughput counts successful requests, from the first send to the last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from bench.load.record import Record


def spread(values: Iterable[float], scale: float = 1000.0) -> dict[str, float]:
    """Mean, median and 99th percentile, in milliseconds."""
    data = np.fromiter(values, dtype=np.float64) * scale
    if not len(data):
        return {"mean": 0.0, "median": 0.0, "p99": 0.0}
    return {"mean": float(data.mean()), "median": float(np.median(data)), "p99": float(np.percentile(data, 99))}


def figures(records: list[Record]) -> dict[str, Any]:
    """All figures of one measured load; times in milliseconds, throughput a second."""
    done = [record for record in records if record.ok]
    failures = Counter(record.status if record.status != "OK" else "NO_TOKENS" for record in records if not record.ok)
    duration = max((r.last for r in done), default=0.0) - min((r.sent for r in done), default=0.0)
    input_tokens, output_tokens = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    per_second = 1.0 / duration if duration > 0 else 0.0
    return {
        "requests": len(records),
        "completed": len(done),
        "failures": dict(failures),
        "failure_details": sorted({r.detail for r in records if r.detail})[:5],
        "duration_s": duration,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": sum(r.cached_tokens for r in done),
        "tokens_per_message": output_tokens / max(1, sum(r.messages for r in done)),
        "request_throughput": len(done) * per_second,
        "output_throughput": output_tokens * per_second,
        "total_throughput": (input_tokens + output_tokens) * per_second,
        "ttft_ms": spread(r.ttft for r in done),
        "tpot_ms": spread(r.tpot for r in done if r.output_tokens > 1),
        "itl_ms": spread(gap for r in done for gap in r.gaps),
        "e2el_ms": spread(r.e2el for r in done),
        "send_delay_ms": spread(max(0.0, r.sent - r.due) for r in records),
    }


def table(result: dict[str, Any]) -> str:
    """The figures as aligned text."""
    lines = [
        f"{'requests':<28}{result['completed']} of {result['requests']} completed",
        f"{'duration (s)':<28}{result['duration_s']:.2f}",
        f"{'input / output tokens':<28}{result['input_tokens']} / {result['output_tokens']}",
        f"{'cached prompt tokens':<28}{result['cached_tokens']}",
        f"{'tokens a message':<28}{result['tokens_per_message']:.2f}",
        f"{'requests/s':<28}{result['request_throughput']:.3f}",
        f"{'output tokens/s':<28}{result['output_throughput']:.2f}",
        f"{'total tokens/s':<28}{result['total_throughput']:.2f}",
        "",
        f"{'ms':<28}{'mean':>10}{'median':>10}{'p99':>10}",
    ]
    lines += [f"{name:<28}" + _spread(result[key]) for name, key in TIMES]
    if generator := result.get("generator"):
        lines += [
            f"{'generator: loop lag':<28}" + _spread(generator["loop_lag_ms"]),
            f"{'generator: CPU share':<28}{generator['cpu_share']:>10.2f} of one core, "
            f"{generator['processes']} process(es)",
        ]
    lines += [f"failed {status:<21}{count}" for status, count in result["failures"].items()]
    return "\n".join(lines + result["failure_details"])


TIMES = (
    ("TTFT", "ttft_ms"),
    ("TPOT", "tpot_ms"),
    ("ITL", "itl_ms"),
    ("E2EL", "e2el_ms"),
    ("generator: sent late by", "send_delay_ms"),
)


def _spread(values: dict[str, float]) -> str:
    return f"{values['mean']:>10.2f}{values['median']:>10.2f}{values['p99']:>10.2f}"
