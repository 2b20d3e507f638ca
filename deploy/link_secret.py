"""Write a random link secret once: ``python link_secret.py FILE``. An existing one is kept."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from pathlib import Path


def write_once(path: Path) -> None:
    """Complete or not at all: a reader never sees half a secret, and of two writers the first one wins."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(secrets.token_hex(32) + "\n")
    part.chmod(0o444)  # the volume is mounted by the two services alone, whose users differ
    try:
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink()


if __name__ == "__main__":
    write_once(Path(sys.argv[1]))
