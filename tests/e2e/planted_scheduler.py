"""A scheduler service whose core does to certain prompts what a defect would.

    python -m tests.e2e.planted_scheduler FLAGS

At the admission of a prompt that begins with CRASH the core ends, with SPIN it stands still; with LATER it ends at
output number OUTPUTS.
"""

from __future__ import annotations

import os
import sys

from protos import step
from protos.wire import unpack_int32
from scheduler_svc import __main__ as service
from scheduler_svc.core import __main__ as core
from scheduler_svc.core.core import Core
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.prefix_cache import Prefix
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.sequence import Sequence

CRASH, LATER, SPIN = 377, 378, 379

OUTPUTS = 6

_admit = Residency.admit
_on_executor = Core.on_executor
_command = service.core_command


def first(sequence: Sequence) -> int:
    return int(unpack_int32(sequence.prompt)[0])


def admit(self: Residency, executor: ExecutorState, sequence: Sequence, hits: Prefix) -> int:
    if first(sequence) == CRASH:
        raise RuntimeError("planted")
    while first(sequence) == SPIN:
        pass
    return _admit(self, executor, sequence, hits)


def on_executor(self: Core, session: bytes, message: step.ToCore, now: float) -> None:
    _on_executor(self, session, message, now)
    for stream in self.streams.by_request.values():
        for sequence in stream.sequences.values():
            if first(sequence) == LATER and sequence.num_outputs >= OUTPUTS:
                os._exit(3)


def core_command(*args: object) -> list[str]:
    command = _command(*args)  # type: ignore[arg-type]
    at = command.index("scheduler_svc.core")
    return [*command[:at], "tests.e2e.planted_scheduler", "core", *command[at + 1 :]]


if __name__ == "__main__":
    if sys.argv[1:2] == ["core"]:
        Residency.admit = admit  # type: ignore[method-assign]
        Core.on_executor = on_executor  # type: ignore[method-assign]
        sys.exit(core.main(sys.argv[2:]))
    service.core_command = core_command
    sys.exit(service.main())
