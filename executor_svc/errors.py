"""The two kinds of fault that a plan can meet (one of its batch's view, one of a single row), and that of a start."""

from __future__ import annotations


class PlanError(Exception):
    """A plan that contradicts the mirror or could not run as a whole: it costs the epoch.

    ``code`` is one of the EpochLost codes of protos.step.
    """

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class RowError(Exception):
    """A fault of one row, and of no other. ``status`` is one of the RowFault codes of protos.step."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class DeviceUnavailable(ValueError):
    """The device cannot be used here; the message is one line that says why."""
