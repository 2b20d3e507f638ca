"""The driver's events chosen by hypothesis: where a schedule breaks the core, the shortest such schedule is shown."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.driver import CONFIGS, EVENTS, Driver

events = st.lists(st.tuples(st.sampled_from([*EVENTS, *["run"] * 12]), st.integers(0, 9999)), min_size=5, max_size=120)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 99), config=st.sampled_from(CONFIGS), schedule=events)
def test_no_schedule_breaks_the_core(seed: int, config: dict[str, Any], schedule: list[tuple[str, int]]) -> None:
    driver = Driver(seed, wait_for_executor=20.0, quarantine=2.0, **config)
    for kind, choice in schedule:
        driver.draw = random.Random(choice)  # each event's details by its own number: they shrink, too
        driver.act(kind)
    driver.draw = random.Random(seed)
    driver.finish()
    driver.check()
