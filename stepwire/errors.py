"""The one error of the client."""

from __future__ import annotations

import grpc


class RequestError(Exception):
    """A request that the server refused, or that could not be continued. `code` is the gRPC status, `message` the
    server's own words."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message

    @classmethod
    def of(cls, error: grpc.RpcError) -> RequestError:
        return cls(error.code() or grpc.StatusCode.UNKNOWN, error.details() or "no details given")
