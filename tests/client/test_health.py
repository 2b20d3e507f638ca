"""The hand-written health messages are those of grpc.health.v1."""

from __future__ import annotations

from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from stepwire.health import STATUSES, _request, _response, check


@pytest.mark.parametrize("service", ["", "stepwire.v1.Inference", "x" * 127])
def test_the_request_is_the_protobuf_one(service: str) -> None:
    assert _request(service) == health_pb2.HealthCheckRequest(service=service).SerializeToString()


@pytest.mark.parametrize("number", STATUSES)
def test_the_response_is_the_protobuf_one(number: int) -> None:
    assert _response(health_pb2.HealthCheckResponse(status=number).SerializeToString()) == STATUSES[number]
    assert STATUSES[number] == health_pb2.HealthCheckResponse.ServingStatus.Name(number)


def test_check_asks_a_server() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert check(f"127.0.0.1:{port}") == "NOT_SERVING"
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        assert check(f"127.0.0.1:{port}") == "SERVING"
        assert check(f"127.0.0.1:{port}", "nothing.Like.It") == "NOT_FOUND"
    finally:
        server.stop(None).wait()
