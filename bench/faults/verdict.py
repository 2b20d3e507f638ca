"""The disturbed run against the undisturbed one: what was lost, duplicated or changed, and how long clients waited."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from bench.faults.streams import Outcome


def judge(expected: Outcome, got: Outcome) -> tuple[str, str]:
    """("", "") or (lost | duplicated | changed, why)."""
    if got.error:
        return "lost", got.error
    if len(got.ids) != len(expected.ids) or any(end is None for end in got.ends):
        return "lost", f"{sum(end is not None for end in got.ends)} of {len(expected.ids)} choices ended"
    if any(count != 1 for count in got.num_ends):
        return "duplicated", f"ends: {got.num_ends}"
    for index, (want, have) in enumerate(zip(expected.ids, got.ids, strict=True)):
        if want == have:
            continue
        at = next((i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have)))
        where = f"choice {index}: {len(have)} tokens for {len(want)}, different from {at} on"
        if len(have) > len(want) and _without_a_run(have, want):
            return "duplicated", where
        if len(have) < len(want) and _without_a_run(want, have):
            return "lost", where
        return "changed", where
    if expected.texts != got.texts:
        return "changed", "the same tokens, another text"
    if expected.logprobs != got.logprobs:
        return "changed", "the same tokens, other log probabilities"
    if expected.ends != got.ends:
        return "changed", f"ends {got.ends} for {expected.ends}"
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(expected, name) != getattr(got, name):
            return "changed", f"usage: {name} {getattr(got, name)} for {getattr(expected, name)}"
    return "", ""


def _without_a_run(longer: list[int], shorter: list[int]) -> bool:
    """Is ``shorter`` what is left of ``longer`` when one run of ids is taken out?"""
    extra = len(longer) - len(shorter)
    return any(longer[:i] + longer[i + extra :] == shorter for i in range(len(shorter) + 1))


LATE = 0.5  # seconds: what was on its way at a fault has arrived


def gap_at(outcome: Outcome, when: float) -> float | None:
    """Seconds of the longest silence that began before ``when`` + LATE and ended after ``when``; None: it was not
    running then."""
    times = outcome.arrivals
    first = bisect.bisect_right(times, when)
    if not 0 < first < len(times):
        return None
    last = bisect.bisect_right(times, when + LATE)
    return max(times[i] - times[i - 1] for i in range(first, min(last, len(times) - 1) + 1))


def percentile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    return {
        "count": len(values),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": percentile(values, 1.0),
    }
