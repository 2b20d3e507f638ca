"""What operators do to the fleet, through the admin service: drain an executor, flush prefix caches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from protos import front
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus

if TYPE_CHECKING:
    from scheduler_svc.core.core import Core

log = logging.getLogger(__name__)


def perform(core: Core, control: front.Control) -> dict[str, object]:
    """The body of the Status that answers. Nothing was done where ``error`` is not empty."""
    executors = list(core.fleet.sessions.values())
    chosen = [e for e in executors if control.executor in ("", e.name, e.session.hex())]
    if control.executor and not chosen:
        return {"error": "no such executor"}
    match control.action:
        case front.DRAIN_EXECUTOR if control.executor:
            return {"error": "", "status": _drain(core, chosen)}
        case front.FLUSH_PREFIX_CACHE:
            return {"error": "", "blocks": sum(executor.cache.flush() for executor in chosen)}
    return {"error": f"unknown action {control.action!r}"}


def _drain(core: Core, executors: list[ExecutorState]) -> str:
    for executor in executors:
        if executor.status is ExecutorStatus.READY:
            log.info("executor drains, an operator asked", extra={"executor": executor.name})
            core.fleet.drains(executor)
            core.fleet_changed = True
    return executors[0].status.name
