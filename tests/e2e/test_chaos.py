"""The chaos bench: what it would say of wrong runs, and a real run of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench import chaos
from bench.faults import log_watch
from bench.faults.acts import KINDS, schedule
from bench.faults.streams import Outcome, make_requests
from bench.faults.verdict import gap_at, judge

WHOLE = Outcome("greedy", [[1, 2, 3, 4, 5]], ["abcde"], [("length", None)], [1], prompt_tokens=3, completion_tokens=5)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, ""),
        ({"error": "UNAVAILABLE"}, "lost"),
        ({"ends": [None]}, "lost"),
        ({"ids": [[1, 2, 4, 5]]}, "lost"),
        ({"ids": [[1, 2, 3, 2, 3, 4, 5]]}, "duplicated"),
        ({"num_ends": [2]}, "duplicated"),
        ({"ids": [[1, 2, 9, 4, 5]]}, "changed"),
        ({"texts": ["abcd"]}, "changed"),
        ({"ends": [("stop", 5)]}, "changed"),
        ({"completion_tokens": 6}, "changed"),
    ],
)
def test_judge(change: dict[str, object], verdict: str) -> None:
    assert judge(WHOLE, replace(WHOLE, **change))[0] == verdict  # type: ignore[arg-type]


def test_the_gap_is_the_silence_after_the_fault() -> None:
    outcome = replace(WHOLE, arrivals=[1.0, 2.0, 2.1, 7.1, 7.2, 20.0])
    assert gap_at(outcome, 2.05) == pytest.approx(5.0), "one message was still on its way"
    assert gap_at(outcome, 0.5) is None
    assert gap_at(outcome, 20.0) is None


def test_every_kind_comes_before_any_comes_twice() -> None:
    faults = schedule(len(KINDS) + 3, 10_000, list(KINDS), random.Random(4))
    assert {fault.kind for fault in faults[: len(KINDS)]} == set(KINDS)
    assert [fault.at_tokens for fault in faults] == sorted(fault.at_tokens for fault in faults)
    again = schedule(len(KINDS) + 3, 10_000, list(KINDS), random.Random(4))
    assert [(f.kind, f.at_tokens) for f in faults] == [(f.kind, f.at_tokens) for f in again]
    assert make_requests(12, 40, 300, 512, 9) == make_requests(12, 40, 300, 512, 9)


def test_deaths_are_read_from_the_logs() -> None:
    text = (
        'time=2026-01-31T12:00:00.500Z level=warning service=core event="executor gone" executor=e0 unanswered=2\n'
        'time=2026-01-31T12:00:01.000Z level=error service=supervisor event="the core is frozen, killing it" silent=4\n'
        "no log line\n"
    )
    found = log_watch.deaths(log_watch.parse(text))
    assert [(who, event) for _, who, event in found] == [
        ("e0", "executor gone"),
        ("core", "the core is frozen, killing it"),
    ]
    assert found[1][0] - found[0][0] == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_anything(tmp_path: Path) -> None:
    report = tmp_path / "chaos.json"
    status = chaos.main(["--streams", "60", "--kills", str(len(KINDS)), "--seed", "11", "--json", str(report)])
    assert status == 0, report.read_text()
    assert json.loads(report.read_text())["kills"] == len(KINDS)
