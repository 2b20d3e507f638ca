"""A process that has done all that takes long at a start, and waits for the one before it to end (child.py).

It waits on a pipe: one byte is its turn; its end says that the supervisor does not need it any more. Its name in
``/proc/PID/comm`` changes at its turn.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def wait_for_turn(descriptor: int, name: str) -> bool:
    """In the child. Returns whether its turn came."""
    came = os.read(descriptor, 1) != b""
    os.close(descriptor)
    if came:
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(name)
    return came
