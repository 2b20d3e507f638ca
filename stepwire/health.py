"""grpc.health.v1 Check without the generated stubs: the client needs nothing but grpcio and protobuf.

HealthCheckRequest{string service = 1} -> HealthCheckResponse{ServingStatus status = 1}.
"""

from __future__ import annotations

import grpc

STATUSES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


def _request(service: str) -> bytes:
    name = service.encode()
    if len(name) > 127:  # one byte of varint length
        raise ValueError("a service name has up to 127 bytes")
    return b"\x0a" + bytes([len(name)]) + name if name else b""


def _response(data: bytes) -> str:
    return STATUSES.get(data[1] if len(data) >= 2 and data[0] == 0x08 else 0, "UNKNOWN")


def check(
    address: str, service: str = "", timeout: float = 3.0, credentials: grpc.ChannelCredentials | None = None
) -> str:
    """The health of a service ("": of the whole server), or the gRPC status name of a call that failed."""
    options = (("grpc.enable_retries", 0),)
    with (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    ) as channel:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=_request, response_deserializer=_response
        )
        try:
            return call(service, timeout=timeout)
        except grpc.RpcError as error:
            return error.code().name
