"""Hex SHA-256 of a checkpoint: its config, then the bytes of its tensor files, streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_CHUNK = 1 << 22  # bytes read at a time


def fingerprint_files(config: bytes, files: Iterable[Path]) -> str:
    """Names do not enter the hash: a renamed checkpoint is the same checkpoint. File order and lengths do."""
    digest = hashlib.sha256(b"stepwire-checkpoint-1\0" + config)
    for file in files:
        digest.update(b"\0file" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
