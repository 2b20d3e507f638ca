"""gRPC method handlers that answer bytes which are no message as any bad request: INVALID_ARGUMENT, nothing leaked.

(The generated registration lets the parser's exception through, which grpc.aio turns into UNKNOWN with its text.)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from scheduler_svc.api.refusal import invalid

Handler = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]

_MALFORMED = object()


def add_service(server: grpc.aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    """Registers every method of ``service``, each a coroutine of ``servicer``."""
    handlers = {method.name: _handler(method, getattr(servicer, method.name)) for method in service.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def _handler(method: MethodDescriptor, act: Handler) -> grpc.RpcMethodHandler:
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    request_class = GetMessageClass(method.input_type)

    async def checked(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request is _MALFORMED:
            refusal = invalid("request", "not readable", f"the bytes of a {method.input_type.full_name}")
            await context.abort(refusal.status, refusal.message, refusal.trailers())
        return await act(request, context)

    return make(checked, request_deserializer=_parser(request_class), response_serializer=_serialized)


def _parser(kind: type[Message]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            message = kind()
            message.ParseFromString(data)
        except DecodeError:
            return _MALFORMED
        return message

    return parse


def _serialized(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data
