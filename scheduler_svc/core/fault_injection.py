"""For tests only: step plans that go wrong between the core and the wire. Off unless ``--inject`` is given.

``--inject lose@5,repeat@40,reorder@80,alter@120`` counts the plans sent to all executors from 1:

* ``lose``: the plan is not sent
* ``repeat``: the plan is sent twice
* ``reorder``: the plan is held back and sent after the next one to the same executor
* ``alter``: a row or a block of the plan is changed, its digest is not
"""

from __future__ import annotations

import msgspec
import numpy as np

from protos.step import StepPlan
from protos.wire import unpack_int32
from scheduler_svc.core.outbox import Destination, Message

KINDS = ("lose", "repeat", "reorder", "alter")


class FaultInjector:
    def __init__(self, spec: str) -> None:
        """Raises ValueError on a spec that is not ``KIND@NUMBER[,...]``."""
        self.faults: dict[int, str] = {}
        for part in filter(None, spec.split(",")):
            kind, _, number = part.partition("@")
            if kind not in KINDS or not number.isdigit():
                raise ValueError(f"--inject {part!r}: KIND@NUMBER with a KIND of {', '.join(KINDS)}")
            self.faults[int(number)] = kind
        self.sent = 0
        self._held: dict[Destination, StepPlan] = {}

    def apply(self, items: list[tuple[Destination, Message]]) -> list[tuple[Destination, Message]]:
        """The messages that are really sent."""
        result: list[tuple[Destination, Message]] = []
        for destination, message in items:
            if not isinstance(message, StepPlan):
                result.append((destination, message))
                continue
            self.sent += 1
            kind = self.faults.get(self.sent, "")
            held = self._held.pop(destination, None)
            if kind == "reorder":
                self._held[destination] = message
            elif kind == "alter":
                result.append((destination, altered(message)))
            elif kind != "lose":
                result.append((destination, message))
            if kind == "repeat":
                result.append((destination, message))
            if held is not None and held.epoch == message.epoch:
                result.append((destination, held))
        return result


def altered(plan: StepPlan) -> StepPlan:
    """The same plan with one thing in it that the digest covers changed."""
    if plan.admitted:
        first = plan.admitted[0]
        blocks = np.array(unpack_int32(first.blocks))
        blocks[-1] ^= 1
        changed = msgspec.structs.replace(first, blocks=blocks.tobytes())
        return msgspec.structs.replace(plan, admitted=(changed, *plan.admitted[1:]))
    if plan.appended:
        pairs = np.array(unpack_int32(plan.appended))
        pairs[-1] ^= 1
        return msgspec.structs.replace(plan, appended=pairs.tobytes())
    if plan.decode:
        return msgspec.structs.replace(plan, decode=plan.decode[:-4])
    return msgspec.structs.replace(plan, digest=plan.digest ^ 1)
