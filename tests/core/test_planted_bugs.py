"""Every check catches something: a bug is planted, and the driver must come upon it, by the check meant for it.

Each bug replaces one function of the core by one that does the wrong thing, all the time or on a condition that the
driver meets. What must be seen is a part of the message: of an invariant (invariants.py), of the model executor
(sim.py), or of the model API worker (world.py).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.core.driver import Driver
from tests.core.planted import blocks, sequences  # noqa: F401 (they register their bugs)
from tests.core.planted.registry import BUGS, Patch

SEEDS = 8
EVENTS = 500


def run(seeds: int, **config: Any) -> str | None:
    """What the driver comes upon, or None."""
    for seed in range(seeds):
        try:
            driver = Driver(seed, wait_for_executor=20.0, quarantine=2.0, **config)
            for _ in range(EVENTS):
                driver.event()
            driver.finish()
            driver.check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


def test_hashes_that_collide_harm_nobody(monkeypatch: Patch) -> None:
    blocks.collide(monkeypatch)
    assert run(3) is None


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    plant, expected, config = BUGS[name]
    plant(monkeypatch)
    found = run(SEEDS, **config)
    assert found is not None, "nothing was found"
    assert re.search(expected, found), found[:2000]
