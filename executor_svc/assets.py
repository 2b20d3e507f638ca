"""The files that the scheduler fetches by hash, apart from the plan path."""

from __future__ import annotations

import hashlib

from protos.step import Asset, AssetChunk, FetchAsset


class AssetStore:
    """Immutable: name -> bytes at start, then served in chunks by SHA-256."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._data: dict[str, bytes] = {}
        listed = []
        for kind, data in files.items():
            digest = hashlib.sha256(data).hexdigest()
            self._data[digest] = data
            listed.append(Asset(kind=kind, sha256=digest, size=len(data)))
        self.listed = tuple(listed)

    def chunk(self, request: FetchAsset) -> AssetChunk:
        """The bytes asked for; empty data where there is no such asset or nothing at that offset."""
        data = self._data.get(request.sha256, b"")
        return AssetChunk(request.sha256, request.offset, data[request.offset : request.offset + request.length])
