"""A client that opens streams and then reads nothing more: raw HTTP/2, so that no library reads on its behalf."""

from __future__ import annotations

import socket
import struct

from protos.stepwire.v1 import inference_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATH = b"/stepwire.v1.Inference/GenerateStream"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_RST_STREAM, _PING, _WINDOW_UPDATE = 3, 6, 8


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541, 6.2.2); both shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def _headers(path: bytes = PATH) -> bytes:
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    return b"".join(_literal(name, value) for name, value in fields)


def grpc_message(data: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(data)) + data


class SlowClient:
    """``window``: the flow-control window of each of its streams, in bytes: that much is taken, and nothing after."""

    def __init__(self, port: int, window: int = 256) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        initial_window = struct.pack(">HI", 4, window)  # SETTINGS_INITIAL_WINDOW_SIZE
        self.socket.sendall(PREFACE + frame(_SETTINGS, 0, 0, initial_window))
        self._next = 1
        self._buffer = b""

    def open(self, request: pb.GenerateRequest) -> int:
        """Starts a call; returns its HTTP/2 stream."""
        stream, self._next = self._next, self._next + 2
        body = grpc_message(request.SerializeToString())
        self.socket.sendall(frame(_HEADERS, _END_HEADERS, stream, _headers()) + frame(_DATA, _END_STREAM, stream, body))
        return stream

    def ends(self, streams: set[int]) -> None:
        """Reads after all, until each of these streams was ended by the server."""
        more = struct.pack(">I", 2**30)
        for stream in (0, *sorted(streams)):
            self.socket.sendall(frame(_WINDOW_UPDATE, 0, stream, more))
        left = set(streams)
        while left:
            kind, flags, stream, payload = self._frame()
            if kind == _SETTINGS and not flags & _ACK:
                self.socket.sendall(frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                self.socket.sendall(frame(_PING, _ACK, 0, payload))
            elif kind == _RST_STREAM or (kind == _HEADERS and flags & _END_STREAM):
                left.discard(stream)

    def _frame(self) -> tuple[int, int, int, bytes]:
        header = self._read(9)
        length = int.from_bytes(header[:3], "big")
        return header[3], header[4], int.from_bytes(header[5:], "big"), self._read(length)

    def _read(self, count: int) -> bytes:
        while len(self._buffer) < count:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._buffer += data
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def close(self) -> None:
        self.socket.close()
