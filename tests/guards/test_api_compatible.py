"""Clients that were built against an earlier proto go on working: nothing that was there may change or go."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.guards.api_surface import BASELINE, broken, surface

REQUEST = "message stepwire.v1.GenerateRequest"


def baseline() -> dict[str, Any]:
    return json.loads(BASELINE.read_text())


def test_the_api_keeps_its_promises() -> None:
    assert not broken(baseline(), surface())


def test_what_is_new_is_in_the_baseline() -> None:
    """So that it is a promise from now on: ``python -m tests.guards.api_surface`` adds it."""
    assert surface() == baseline()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda s: s.pop(REQUEST), "is gone"),
        (lambda s: s[REQUEST].pop("9"), "priority: int32"),
        (lambda s: s[REQUEST].update({"9": "priority: sint32"}), "sint32"),
        (lambda s: s[REQUEST].update({"9": "rank: int32"}), "rank"),
        (lambda s: s[REQUEST].update({"99": s[REQUEST].pop("1")}), "request_id"),
        (lambda s: s["message stepwire.v1.Sampling"].update({"1": "temperature: float"}), "optional float"),
        (lambda s: s[REQUEST].update({"3": "text: string"}), "in prompt"),
        (lambda s: s["service stepwire.v1.Inference"].pop("Generate"), "Generate"),
        (lambda s: s["service stepwire.v1.Inference"].update(GenerateStream="A -> B"), "GenerateStream"),
        (lambda s: s["enum stepwire.v1.FinishReason"].update({"1": "FINISH_REASON_OTHER"}), "FINISH_REASON_STOP"),
    ],
)
def test_breaking_changes_are_found(change: Any, word: str) -> None:
    changed = copy.deepcopy(surface())
    change(changed)
    (problem,) = broken(baseline(), changed)
    assert word in problem


def test_additions_are_no_break() -> None:
    changed = copy.deepcopy(surface())
    changed[REQUEST]["1000"] = "more: string"
    changed["message stepwire.v1.New"] = {}
    assert not broken(baseline(), changed)
