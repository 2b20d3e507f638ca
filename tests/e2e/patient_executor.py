"""An executor that waits, until it is welcomed for the first time, for every scheduler's word on how much it is needed:
``python -m tests.e2e.patient_executor FLAGS``. On a busy machine the usual second may be too short for one of them.
"""

from __future__ import annotations

import sys

from executor_svc import __main__ as executor
from executor_svc import homing

_USUAL = homing.PATIENCE
_welcomed = homing.Homing.welcomed


def welcomed(self: homing.Homing, address: str) -> None:
    homing.PATIENCE = _USUAL
    _welcomed(self, address)


if __name__ == "__main__":
    homing.PATIENCE = 60.0
    homing.Homing.welcomed = welcomed  # type: ignore[method-assign]
    sys.exit(executor.main())
