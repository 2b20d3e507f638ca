"""Tokenizers, templates and generation defaults: fetched from executors by SHA-256, kept, served to API workers.

What was fetched is used only if it hashes to its name. Everything is bounded: the size an executor states, the bytes
kept, the API workers' requests that wait.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from protos import front, step
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState
from scheduler_svc.core.outbox import Outbox


class _Fetch:
    def __init__(self, asset: step.Asset, session: bytes) -> None:
        self.asset = asset
        self.session = session
        self.data = bytearray()


class Assets:
    def __init__(self, config: CoreConfig, outbox: Outbox) -> None:
        self.store: OrderedDict[str, bytes] = OrderedDict()  # by hash, least recently used first
        self.bad: int = 0  # assets whose content did not hash to their name
        self._bytes = 0
        self._config = config
        self._outbox = outbox
        self._fetches: dict[str, _Fetch] = {}
        self._waiters: dict[str, list[tuple[bytes, front.FetchAsset]]] = {}
        self._sources: dict[str, dict[bytes, step.Asset]] = {}  # hash -> sessions that have it

    def announce(self, executor: ExecutorState) -> None:
        """An executor joined: what it has is fetched now, so that it is here when the executor is not."""
        for asset in executor.card.assets:
            self._sources.setdefault(asset.sha256, {})[executor.session] = asset
            if asset.sha256 not in self.store and asset.sha256 not in self._fetches:
                self._start(asset.sha256)

    def session_gone(self, session: bytes) -> None:
        for sha256, sources in list(self._sources.items()):
            sources.pop(session, None)
            if not sources:
                del self._sources[sha256]
        for sha256, fetch in list(self._fetches.items()):
            if fetch.session == session:
                del self._fetches[sha256]
                self._start(sha256)

    def worker_gone(self, worker: bytes) -> None:
        for sha256, waiters in list(self._waiters.items()):
            self._waiters[sha256] = [waiter for waiter in waiters if waiter[0] != worker]

    def on_chunk(self, session: bytes, chunk: step.AssetChunk) -> bool:
        """Returns False for a chunk that was not asked for."""
        fetch = self._fetches.get(chunk.sha256)
        if fetch is None or fetch.session != session or chunk.offset != len(fetch.data):
            return False
        fetch.data += chunk.data
        size = fetch.asset.size
        if not chunk.data or len(fetch.data) > size:
            self._give_up(fetch)
        elif len(fetch.data) < size:
            self._ask(fetch)
        elif hashlib.sha256(fetch.data).hexdigest() != chunk.sha256:
            self.bad += 1
            self._give_up(fetch)
        else:
            self._keep(fetch)
        return True

    def serve(self, worker: bytes, request: front.FetchAsset) -> None:
        """Answer an API worker now, or when the asset is here. ``total`` 0 means: nobody has it."""
        data = self.store.get(request.sha256)
        if data is not None:
            self.store.move_to_end(request.sha256)
            part = data[request.offset : request.offset + request.length]
            self._outbox.to_worker(worker, front.AssetChunk(request.sha256, request.offset, len(data), part))
            return
        if request.sha256 not in self._fetches and request.sha256 in self._sources:
            self._start(request.sha256)
        waiting = sum(map(len, self._waiters.values()))
        if request.sha256 in self._fetches and waiting < self._config.max_asset_waiters:
            self._waiters.setdefault(request.sha256, []).append((worker, request))
            return
        self._outbox.to_worker(worker, front.AssetChunk(request.sha256, request.offset, 0, b""))

    def _start(self, sha256: str) -> None:
        """Fetch from any source; without one, whoever waits is told."""
        for session, asset in self._sources.get(sha256, {}).items():
            fetch = _Fetch(asset, session)
            self._fetches[sha256] = fetch
            if asset.size == 0:
                if hashlib.sha256(b"").hexdigest() == sha256:
                    self._keep(fetch)
                else:
                    self._give_up(fetch)
            else:
                self._ask(fetch)
            return
        for worker, request in self._waiters.pop(sha256, []):
            self._outbox.to_worker(worker, front.AssetChunk(sha256, request.offset, 0, b""))

    def _ask(self, fetch: _Fetch) -> None:
        offset = len(fetch.data)
        length = min(self._config.asset_chunk, fetch.asset.size - offset)
        self._outbox.to_executor(fetch.session, step.FetchAsset(fetch.asset.sha256, offset, length))

    def _give_up(self, fetch: _Fetch) -> None:
        """This source does not have what it said: try another one."""
        sha256 = fetch.asset.sha256
        del self._fetches[sha256]
        sources = self._sources.get(sha256, {})
        sources.pop(fetch.session, None)
        if not sources:
            self._sources.pop(sha256, None)
        self._start(sha256)

    def _keep(self, fetch: _Fetch) -> None:
        sha256 = fetch.asset.sha256
        del self._fetches[sha256]
        self.store[sha256] = bytes(fetch.data)
        self._bytes += len(fetch.data)
        for worker, request in self._waiters.pop(sha256, []):
            self.serve(worker, request)
        while self._bytes > self._config.asset_cache and len(self.store) > 1:
            _, dropped = self.store.popitem(last=False)
            self._bytes -= len(dropped)
