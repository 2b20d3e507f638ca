"""Where this user's compiled code is kept."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """``$XDG_CACHE_HOME/stepwire``, or ``~/.cache/stepwire``; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "stepwire" if os.path.isabs(base) else None
