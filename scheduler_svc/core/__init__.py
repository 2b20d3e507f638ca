"""The scheduler core: slots, blocks, policy, pipeline, fleet. A state machine (core.py) and a thin shell (loop.py)."""

from __future__ import annotations


def kind() -> str:
    """``compiled`` to C (deploy/compile_core.py), as in the scheduler's image, or ``interpreted``."""
    from scheduler_svc.core import core

    return "interpreted" if core.__file__.endswith(".py") else "compiled"
