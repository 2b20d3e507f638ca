"""The worker process as an object: core link, models, gRPC server, health, and the way they come and go."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

import grpc
import zmq.asyncio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.front import Models
from protos.stepwire.v1 import admin_pb2, inference_pb2
from scheduler_svc.api.admin import SERVICE_NAME as ADMIN_SERVICE_NAME
from scheduler_svc.api.admin import AdminService
from scheduler_svc.api.core_link import CoreLink, LinkConfig
from scheduler_svc.api.handlers import add_service
from scheduler_svc.api.health import Health
from scheduler_svc.api.metrics import Metrics
from scheduler_svc.api.models import ModelRegistry
from scheduler_svc.api.security import TlsFiles
from scheduler_svc.api.service import SERVICE_NAME, InferenceService, ServiceConfig
from scheduler_svc.api.tenancy import Tenancy
from scheduler_svc.reloaded import Reloaded

log = logging.getLogger(__name__)

# A million token ids are 3 MB. A message of nothing but empty parts takes up to 0.1 s a MiB to parse, and a worker that
# stands still for seconds may be taken for frozen (child.py).
MAX_REQUEST_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Times in seconds."""

    link: LinkConfig
    listen: str = "127.0.0.1:50051"
    reuse_port: bool = False
    reflection: bool = True
    max_receive_bytes: int = MAX_REQUEST_BYTES
    leave_grace: float = 2.0  # still accepting, already NOT_SERVING
    drain_limit: float = 60.0  # for the streams that are open then
    service: ServiceConfig = field(default_factory=ServiceConfig)
    api_keys: Reloaded[dict[str, str]] | None = None  # tenants by key digest (tenancy.py); None: none is asked for
    tls: TlsFiles | None = None  # of both ports
    admin_listen: str = ""  # HOST:PORT of the admin service; empty: off
    admin_key: str = ""


def grpc_options(config: ServerConfig) -> list[tuple[str, int]]:
    """Channel arguments of the server."""
    return [
        # Gateways ping every 10 s; the defaults would end their quiet streams with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_receive_message_length", config.max_receive_bytes),
        ("grpc.max_send_message_length", -1),  # what is sent is bounded by the context
        # Off: a second process on the same port is an error, not a silent share of the calls.
        ("grpc.so_reuseport", int(config.reuse_port)),
    ]


class ApiServer:
    """``await start()``; later ``await leave()`` (drains) or ``await stop()`` (at once)."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = 0
        self.metrics = Metrics()
        self.health = Health(("", SERVICE_NAME))
        self._context = zmq.asyncio.Context()
        self.link = CoreLink(config.link, self._context, on_models=self._on_models, on_change=self._update_health)
        self.models = ModelRegistry(self.link.fetch, self._update_health, config.service.startup_grace)
        self.tenancy = Tenancy(config.api_keys)
        self.service = InferenceService(self.link, self.models, self.metrics, config.service, self.tenancy)
        self._server = grpc.aio.server(options=grpc_options(config))
        self.admin_port = 0
        self._admin: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        metrics = self.metrics
        metrics.gauge("stepwire_api_open_calls", "Calls open.", lambda: self.service.open_calls)
        metrics.gauge("stepwire_api_core_link_up", "1 while attached to the core.", lambda: self.link.up)
        metrics.gauge("stepwire_api_serving", "1 while health says SERVING.", lambda: self.health.serving)

    async def start(self) -> None:
        """Binds and serves. Raises RuntimeError where an address is taken, ValueError for files that are no PEM."""
        credentials = self.config.tls.credentials() if self.config.tls is not None else None
        services = [SERVICE_NAME, health.SERVICE_NAME]
        add_service(self._server, inference_pb2.DESCRIPTOR.services_by_name["Inference"], self.service)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        if self.config.reflection:
            reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], self._server)
        self.port = _bind(self._server, self.config.listen, credentials)
        if self.config.admin_listen:
            self._admin = grpc.aio.server(
                options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1024 * 1024)]
            )
            service = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
            add_service(self._admin, service, AdminService(self.link, self.config.admin_key))
            if self.config.reflection:
                reflection.enable_server_reflection([ADMIN_SERVICE_NAME, reflection.SERVICE_NAME], self._admin)
            self.admin_port = _bind(self._admin, self.config.admin_listen, credentials)
            await self._admin.start()
        await self._server.start()
        self._tasks = [asyncio.create_task(self.link.run()), asyncio.create_task(self._sweep())]
        log.info("listening", extra={"address": self.config.listen, "port": self.port})

    async def leave(self) -> None:
        """NOT_SERVING first, still accepting for a grace; then refuse, let the open streams end, detach, stop."""
        self.health.leave()
        log.info("leaving", extra={"calls": self.service.open_calls})
        await asyncio.sleep(self.config.leave_grace)
        stopping = asyncio.create_task(self._server.stop(self.config.drain_limit))  # GOAWAY, no new calls
        self.health.close()
        until = time.monotonic() + self.config.drain_limit
        while self.service.open_calls and time.monotonic() < until and not stopping.done():
            await asyncio.wait([stopping], timeout=0.05)
        await self.stop()
        await stopping

    async def stop(self) -> None:
        """Ends every call now and detaches from the core."""
        self.health.leave()
        self.health.close()
        await self._server.stop(0.2)
        if self._admin is not None:
            await self._admin.stop(0.2)
        await self.models.close()
        self.link.detach()
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("task failed", extra={"reason": repr(result)})
        self.service.close()
        self._context.term()

    async def wait_failed(self) -> None:
        """Returns only by raising, when a part of the server failed that must never end."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(0.5, self.config.link.down_limit / 4, self.config.service.slow_seconds / 4))
            self._update_health()
            self.link.sweep()
            self.service.sweep()
            self.tenancy.sweep()

    def _on_models(self, message: Models) -> None:
        self.models.update(message)

    def _update_health(self) -> None:
        self.health.set(self.link.talks and self.models.any_ready)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)
