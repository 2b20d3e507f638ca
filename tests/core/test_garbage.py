"""The core frees what ended without the cycle collector, which is off while it runs (garbage.py)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_svc.core import garbage
from tests.core.driver import Driver

OURS = ("scheduler_svc.", "protos.")


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def cycles() -> list[Any]:
    """Objects of the core's own classes that only the collector could free."""
    gc.collect()
    found = [thing for thing in gc.garbage if type(thing).__module__.startswith(OURS)]
    gc.garbage.clear()
    return found


@pytest.mark.usefixtures("collector_off")
def test_whatever_happens_the_core_leaves_no_cycles() -> None:
    driver = Driver(5, wait_for_executor=20.0, quarantine=2.0)
    cycles()
    for _ in range(800):
        driver.event()
    left = [type(thing).__name__ for thing in cycles()]
    assert not left, left[:20]
    streams = driver.world.core.streams
    assert streams.finished + streams.failed > 50
    assert driver.done["die"] + driver.done["loss"] > 3


def test_nothing_is_collected_in_a_turn_and_much_is_in_a_quiet_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *a: collected.append(1))
    monkeypatch.setattr(gc, "get_count", lambda: (garbage.WORTH_A_LOOK, 0, 0))
    assert not garbage.collect_if_worth(quiet=False)
    assert garbage.collect_if_worth(quiet=True)
    monkeypatch.setattr(gc, "get_count", lambda: (garbage.WORTH_A_LOOK - 1, 0, 0))
    assert not garbage.collect_if_worth(quiet=True)
    monkeypatch.setattr(gc, "get_count", lambda: (garbage.ENOUGH, 0, 0))
    assert garbage.collect_if_worth(quiet=False)
    assert len(collected) == 2
