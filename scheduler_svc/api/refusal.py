"""A request that gets no answer, and how gRPC says so: status, rich details, push-back."""

from __future__ import annotations

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from protos import front

UNAUTHENTICATED = 16

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_RETRYABLE = frozenset({front.RESOURCE_EXHAUSTED, front.UNAVAILABLE})
_SHOWN = 128  # characters of a value that a message repeats

ERROR_DOMAIN = "stepwire"
DEFAULT_RETRY_AFTER = 1.0  # seconds, where nobody named a time


class Refusal(Exception):
    """Ends a call with a status other than OK. ``field``, ``value`` and ``limit`` name what was wrong."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        field: str = "",
        value: str = "",
        limit: str = "",
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.value = value
        self.limit = limit
        self.retry_after = retry_after or (DEFAULT_RETRY_AFTER if code in _RETRYABLE else 0.0)

    @property
    def status(self) -> grpc.StatusCode:
        return _CODES.get(self.code, grpc.StatusCode.INTERNAL)

    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """``grpc-status-details-bin`` (google.rpc.Status); where a retry makes sense ``grpc-retry-pushback-ms`` too."""
        status = status_pb2.Status(code=self.status.value[0], message=self.message)
        if self.field and self.code == front.INVALID_ARGUMENT:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
            status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.field or self.value or self.limit:
            named = {"field": self.field, "value": self.value, "limit": self.limit}
            info = error_details_pb2.ErrorInfo(domain=ERROR_DOMAIN, reason=self.status.name)
            info.metadata.update({key: text for key, text in named.items() if text})
            status.details.add().Pack(info)
        if self.retry_after <= 0:
            return (("grpc-status-details-bin", status.SerializeToString()),)
        milliseconds = max(1, round(self.retry_after * 1000))
        delay = Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return (
            ("grpc-status-details-bin", status.SerializeToString()),
            ("grpc-retry-pushback-ms", str(milliseconds)),
        )


def invalid(field: str, value: object, limit: str) -> Refusal:
    """INVALID_ARGUMENT: ``field`` is ``value``, and must be ``limit``."""
    shown = value if isinstance(value, str) else repr(value)
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    return Refusal(
        front.INVALID_ARGUMENT, f"{field} is {shown}: must be {limit}", field=field, value=shown, limit=limit
    )


def unavailable(message: str, retry_after: float = 0.0) -> Refusal:
    return Refusal(front.UNAVAILABLE, message, retry_after=retry_after)


def relayed(message: front.Rejected | front.Failed) -> Refusal:
    """What the core said, as it said it."""
    if isinstance(message, front.Failed):
        return Refusal(message.code, message.message, retry_after=message.retry_after)
    text = message.message
    missing = [part for part in (message.field, message.value, message.limit) if part and part not in text]
    if missing:
        text = f"{text} ({', '.join(missing)})"
    return Refusal(
        message.code,
        text,
        field=message.field,
        value=message.value,
        limit=message.limit,
        retry_after=message.retry_after,
    )
