"""``python -m tests.kernels.stand_in_executor``: the executor as it is, whose GPU is a stand-in (stand_in.py)."""

from __future__ import annotations

import sys

from executor_svc import __main__ as executor
from executor_svc.backends.cuda import device
from tests.kernels.ptx.launcher import PtxLauncher
from tests.kernels.stand_in import StandIn


def main() -> int:
    device.open_device = lambda: StandIn(PtxLauncher(check_races=False))  # type: ignore[assignment, return-value]
    return executor.main()


if __name__ == "__main__":
    sys.exit(main())
