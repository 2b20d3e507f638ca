"""grpc.health.v1: Check, and a Watch that tells every change to any number of watchers.

Not grpc_health's own asyncio servicer: there the first watcher of a service to leave takes the others' news with it, a
watcher that does not read holds up `set`, and nothing ends the watches at shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Health(health_pb2_grpc.HealthServicer):
    """One status for all of ``services``."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._serving = False
        self._sticky = False
        self._closed = False
        self._news = asyncio.Event()  # replaced at every change

    @property
    def serving(self) -> bool:
        return self._serving

    def set(self, serving: bool) -> None:
        """Says so to everyone, unless ``leave`` was called."""
        if not self._sticky and serving != self._serving:
            self._serving = serving
            self._tell()

    def leave(self) -> None:
        """NOT_SERVING from now on."""
        self.set(False)
        self._sticky = True

    def close(self) -> None:
        """Ends every watch."""
        self._closed = True
        self._tell()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service[:128]!r} is not served here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told = None
        while not self._closed:
            news = self._news
            status = self._status(request.service)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
                continue  # it may have changed while that was written
            await news.wait()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        return health_pb2.HealthCheckResponse.SERVING if self._serving else health_pb2.HealthCheckResponse.NOT_SERVING

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
