"""The core frees what ended without the cycle collector, which is off while it runs (garbage.py)."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_svc.core import garbage
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.pipeline import PlanRecord
from scheduler_svc.core.sequence import Sequence, Stream
from scheduler_svc.core.workers import WorkerState
from tests.core.driver import Driver

OURS = ("scheduler_svc.", "protos.")
COME_AND_GO = (ExecutorState, PlanRecord, Sequence, Stream, WorkerState)


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


def alive() -> Counter[str]:
    """How many there are of what comes and goes."""
    gc.collect()
    kinds = map(type, gc.get_objects())  # not isinstance: it asks an object, which may be a proxy of one that is gone
    return Counter(kind.__name__ for kind in kinds if kind in COME_AND_GO)


def test_nothing_is_kept_of_what_ended() -> None:
    """As memory is lost without a cycle: something refers to it, or (compiled) was counted as if it did."""
    before = alive()
    driver = Driver(6, wait_for_executor=20.0, quarantine=2.0)
    for _ in range(800):
        driver.event()
    assert (alive() - before)["Sequence"] > 10
    driver.finish()
    driver.world.tick(0.1)
    assert alive() - before == {"ExecutorState": len(driver.homes), "WorkerState": len(driver.workers)}


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
