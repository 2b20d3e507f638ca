"""The file of tenants' limits.

It is JSON::

    {"default": {"max_requests": 64},
     "tenants": {"acme": {"max_requests": 512, "max_queued_tokens": 2000000,
                          "tokens_per_second": 5000, "burst": 60000}}}

What is left out is not limited; a tenant that is not named has the default. What the limits mean: tenants.py.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """0: no limit."""

    max_requests: int = 0
    max_queued_tokens: int = 0
    tokens_per_second: float = 0.0
    burst: float = 0.0  # tokens; 0: ten seconds' worth

    def __post_init__(self) -> None:
        if min(self.max_requests, self.max_queued_tokens) < 0:
            raise ValueError("a limit must not be negative")
        for value in (self.tokens_per_second, self.burst):
            if not 0.0 <= value < float("inf"):
                raise ValueError("tokens_per_second and burst must be numbers of 0 and more")

    @property
    def bucket(self) -> float:
        return self.burst or 10.0 * self.tokens_per_second


class LimitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    default: Limits = Limits()
    tenants: dict[str, Limits] = {}


NO_LIMITS = LimitsFile()


def load_limits(path: Path) -> LimitsFile:
    """Raises ValueError with the file's name."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LimitsFile)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error
