"""A file of settings that may change while the service runs: looked at once a second, and read again when it changed.

What replaces it is read as a whole or not at all: a file that cannot be read, or says what cannot be, leaves the former
settings in force, and is named in the log once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two looks

Settings = TypeVar("Settings")


class Reloaded(Generic[Settings]):
    """``load`` reads the file, and raises ValueError, with the file's name, where it cannot be taken."""

    def __init__(self, path: Path, load: Callable[[Path], Settings]) -> None:
        """Raises what ``load`` raises."""
        self._path = path
        self._load = load
        self._seen = _facts(path)
        self.settings = load(path)

    def changed(self) -> bool:
        """Look at the file; True when ``settings`` are new."""
        facts = _facts(self._path)
        if facts == self._seen:
            return False
        self._seen = facts
        try:
            self.settings = self._load(self._path)
        except ValueError as error:
            log.error("file not taken, the former one holds", extra={"file": str(self._path), "reason": str(error)})
            return False
        log.info("file read again", extra={"file": str(self._path)})
        return True


def _facts(path: Path) -> tuple[int, ...]:
    """Other ones after any change, a rename over it included."""
    try:
        found = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
