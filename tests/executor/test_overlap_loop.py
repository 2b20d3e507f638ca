"""The service's loop while a step is held back: the next plan or the device, whichever comes first."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from executor_svc.service import IDLE_WAIT, ExecutorService


class _Scripted(ExecutorService):
    """Its link and its worker follow a script of turns: the plan that is queued then, and whether the device is done
    with the step that is held back."""

    def __init__(self, turns: list[tuple[str | None, bool]]) -> None:
        self.log: list[Any] = []
        self._turns = iter(turns)
        self._ready = False
        self._stops = 0
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self.link = SimpleNamespace(drained=False, next_plan=self._next_plan, close=lambda reason: None)  # type: ignore[assignment]
        self.worker = _Worker(self)  # type: ignore[assignment]

    def _next_plan(self, timeout: float) -> str | None:
        plan, self._ready = next(self._turns, (None, False))
        if (plan, self._ready) == (None, False) and self.worker.previous is None:
            self._stops = 2
        self.log.append(timeout)
        return plan


class _Worker:
    def __init__(self, service: _Scripted) -> None:
        self._service = service
        self.previous: str | None = None

    @property
    def previous_ready(self) -> bool:
        return self._service._ready

    def execute_plan(self, plan: str) -> None:
        self._service.log.append(plan)
        self.previous = plan

    def finish_previous(self) -> None:
        if self.previous is not None:
            self._service.log.append(f"{self.previous} finished")
        self.previous = None


@pytest.mark.parametrize(
    ("turns", "log"),
    [
        # A plan that comes while the device runs is executed: nobody waits for the device with empty hands.
        ([("one", False), (None, False), (None, False), ("two", False), (None, True)],
         [IDLE_WAIT, "one", 0.0, 0.0, 0.0, "two", 0.0, "two finished"]),
        # Without one, the step's tokens go out as soon as they are there.
        ([("one", False), (None, False), (None, True), ("two", True), (None, True)],
         [IDLE_WAIT, "one", 0.0, 0.0, "one finished", IDLE_WAIT, "two", 0.0, "two finished"]),
        # A plan that is queued goes first even when the device is done.
        ([("one", False), ("two", True), (None, True)], [IDLE_WAIT, "one", 0.0, "two", 0.0, "two finished"]),
    ],
)  # fmt: skip
def test_whichever_comes_first(turns: list[tuple[str | None, bool]], log: list[Any]) -> None:
    service = _Scripted(turns)
    service.run()
    assert service.log == [*log, IDLE_WAIT]
