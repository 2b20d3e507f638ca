"""The files of a model folder, read with a limit each, and never from outside the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from executor_svc.weights.errors import CheckpointError

# Bytes. Decoded, JSON takes up to thirty times its size: what is decoded whole has the small limit.
MAX_JSON: Final = 8 << 20
MAX_LARGE: Final = 64 << 20  # tokenizers and indexes


class ModelFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        real = path.resolve()
        # The hub's cache keeps the files of a snapshot as links to its blobs.
        blobs = real.parent.parent / "blobs"
        self._inside = (real, blobs) if real.parent.name == "snapshots" else (real,)

    def find(self, name: str) -> Path | None:
        """The file's path, or None. ``CheckpointError`` where it is a link to somewhere else."""
        path = self.path / name
        if not path.is_file():
            return None
        real = path.resolve()
        if not any(real.is_relative_to(folder) for folder in self._inside):
            raise CheckpointError(f"{path}: a link to {real}, outside the model's folder")
        return path

    def bytes(self, name: str, limit: int = MAX_JSON) -> bytes | None:
        path = self.find(name)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read(size) if size <= limit else None
        except OSError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if data is None:
            raise CheckpointError(f"{path}: {size} bytes, larger than {limit} bytes")
        return data

    def text(self, name: str) -> str | None:
        raw = self.bytes(name)
        try:
            return None if raw is None else raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path / name}: {error}") from None

    def json(self, name: str) -> dict[str, Any] | None:
        raw = self.bytes(name)
        if raw is None:
            return None
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{name}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{name}: not a JSON object")
        return value
