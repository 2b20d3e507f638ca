"""stepwire.v1.Admin: what operators see and do, out of one question to the core each."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from protos import front
from protos.stepwire.v1 import admin_pb2 as pb
from protos.stepwire.v1 import admin_pb2_grpc as pb_grpc
from scheduler_svc.api.core_link import CoreLink
from scheduler_svc.api.door import MAX_REQUEST_ID
from scheduler_svc.api.refusal import UNAUTHENTICATED, Refusal, invalid
from scheduler_svc.api.tenancy import bearer

log = logging.getLogger(__name__)

SERVICE_NAME = "stepwire.v1.Admin"

Answer = TypeVar("Answer")


class AdminService(pb_grpc.AdminServicer):
    """``key``: what callers must show; empty: nothing (loopback only, see server.py)."""

    def __init__(self, link: CoreLink, key: str = "") -> None:
        self._link = link
        self._key = hashlib.sha256(key.encode()).digest() if key else b""

    async def ListExecutors(
        self, request: pb.ListExecutorsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListExecutorsResponse:
        async def answer() -> pb.ListExecutorsResponse:
            status = await self._status()
            if request.model and all(model["name"] != request.model for model in status["models"]):
                raise _not_found("model", request.model)
            chosen = [e for e in status["executors"] if request.model in ("", e["model"])]
            return pb.ListExecutorsResponse(executors=[_executor(entry) for entry in chosen])

        return await self._answer(context, answer)

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        async def answer() -> pb.GetLoadResponse:
            status = await self._status()
            return pb.GetLoadResponse(
                uptime=status["uptime"],
                models=[
                    pb.ModelLoad(
                        name=entry["name"],
                        executors_ready=entry["executors_ready"],
                        executors_expected=entry["executors_expected"],
                        running=entry["running"],
                        waiting=entry["waiting"],
                        live_requests=entry["live_streams"],
                    )
                    for entry in status["models"]
                ],
                tenants=[pb.TenantLoad(**_known(entry, pb.TenantLoad)) for entry in status["tenants"]],
                counters=status["counters"],
            )

        return await self._answer(context, answer)

    async def DrainExecutor(
        self, request: pb.DrainExecutorRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainExecutorResponse:
        async def answer() -> pb.DrainExecutorResponse:
            if not request.executor:
                raise invalid("executor", "empty", "the name or the session of an executor")
            body = await self._control(front.DRAIN_EXECUTOR, request.executor)
            return pb.DrainExecutorResponse(status=body["status"])

        return await self._answer(context, answer)

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.FlushPrefixCacheResponse:
        async def answer() -> pb.FlushPrefixCacheResponse:
            body = await self._control(front.FLUSH_PREFIX_CACHE, request.executor)
            return pb.FlushPrefixCacheResponse(blocks=body["blocks"])

        return await self._answer(context, answer)

    async def ExplainRequest(
        self, request: pb.ExplainRequestRequest, context: grpc.aio.ServicerContext
    ) -> pb.ExplainRequestResponse:
        async def answer() -> pb.ExplainRequestResponse:
            if not 1 <= len(request.request_id) <= MAX_REQUEST_ID:
                raise invalid("request_id", f"{len(request.request_id)} characters", f"1 to {MAX_REQUEST_ID}")
            status = await self._status(request.request_id)
            found = status["request"]
            if "choices" not in found:
                raise _not_found("request", request.request_id)
            choices = [pb.ChoiceState(**_known(choice, pb.ChoiceState)) for choice in found.pop("choices")]
            found = _known(found, pb.ExplainRequestResponse)
            return pb.ExplainRequestResponse(request_id=request.request_id, choices=choices, **found)

        return await self._answer(context, answer)

    # ----------------------------------------------------------------------------------------------------------------

    async def _status(self, request_id: str = "") -> dict[str, Any]:
        return await self._link.ask(lambda ticket: front.GetStatus(ticket, request_id))

    async def _control(self, action: str, executor: str) -> dict[str, Any]:
        if len(executor) > 256:
            raise invalid("executor", f"{len(executor)} characters", "at most 256 characters")
        body: dict[str, Any] = await self._link.ask(lambda ticket: front.Control(ticket, action, executor))
        if body["error"]:
            raise _not_found("executor", executor)
        log.info("admin", extra={"action": action, "executor": executor})
        return body

    async def _answer(self, context: grpc.aio.ServicerContext, work: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            self._check_key(context)
            return await work()
        except Refusal as error:
            refusal = error
        except Exception:
            log.exception("admin call failed")
            refusal = Refusal(front.INTERNAL, "internal error")
        return await context.abort(refusal.status, refusal.message, refusal.trailers())

    def _check_key(self, context: grpc.aio.ServicerContext) -> None:
        if not self._key:
            return
        shown = hashlib.sha256((bearer(context.invocation_metadata()) or "").encode()).digest()
        if not hmac.compare_digest(shown, self._key):
            raise Refusal(UNAUTHENTICATED, "the admin key is needed: metadata `authorization: Bearer KEY`")


def _known(entry: dict[str, Any], kind: Any) -> dict[str, Any]:
    """What the message has a field for: the core may say more, to tests and metrics."""
    return {key: value for key, value in entry.items() if key in kind.DESCRIPTOR.fields_by_name}


def _not_found(field: str, value: str) -> Refusal:
    return Refusal(front.NOT_FOUND, f"{field} {value[:128]!r} is not known here", field=field, value=value[:128])


def _executor(entry: dict[str, Any]) -> pb.Executor:
    return pb.Executor(
        name=entry["name"],
        session=entry["session"],
        model=entry["model"],
        status=entry["status"],
        device=entry["device"],
        steps=entry["steps"],
        round_us=entry["round_us"],
        oldest_step_age=entry["oldest_step_age"],
        unanswered_steps=entry["unanswered"],
        slots_used=entry["slots"]["used"],
        slots_total=entry["slots"]["total"],
        blocks_total=entry["blocks"]["total"],
        blocks_free=entry["blocks"]["free"],
        blocks_cached=entry["blocks"]["cached"],
        blocks_owned=entry["blocks"]["owned"],
        prefix_hits=entry["prefix"]["hits"],
        prefix_lookups=entry["prefix"]["lookups"],
    )
