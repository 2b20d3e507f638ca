"""A client that costs next to nothing: opens streams over raw HTTP/2 and takes what comes, so that a server under
measure, not its load generator, is what is busy. It looks into no message but each stream's last."""

from __future__ import annotations

import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_MOST = 2**31 - 1  # a window's largest size, bytes


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541, 6.2.2); both shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class DrainClient:
    """One connection. ``messages`` counts what came; ``last`` holds each stream's latest message."""

    def __init__(self, host: str, port: int) -> None:
        self.messages = 0
        self.last: dict[int, bytes] = {}
        self.socket = socket.create_connection((host, port))
        self._next = 1
        self._open: set[int] = set()
        self._buffer = bytearray()
        self._partial: dict[int, bytes] = {}  # by stream: the beginning of a message whose rest is to come
        self._taken = 0  # bytes, not yet given back to the connection's window
        settings = struct.pack(">HI", 4, _MOST)  # SETTINGS_INITIAL_WINDOW_SIZE: no stream ever waits for us
        more = struct.pack(">I", _MOST - 65535)
        self.socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, more))

    def open(self, method: bytes, message: bytes) -> int:
        """Starts a call with one request message; returns its stream."""
        stream, self._next = self._next, self._next + 2
        fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", method), (b":authority", b"bench")]
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        headers = b"".join(_literal(name, value) for name, value in fields)
        body = b"\0" + struct.pack(">I", len(message)) + message
        self.socket.sendall(_frame(_HEADERS, _END_HEADERS, stream, headers) + _frame(_DATA, _END_STREAM, stream, body))
        self._open.add(stream)
        return stream

    def read(self) -> bool:
        """Takes what is there, waiting for something; returns whether streams are still open."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError(f"the server closed the connection with {len(self._open)} streams open")
        self._taken += len(data)
        if self._taken > 1 << 24:
            self.socket.sendall(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0
        buffer = self._buffer
        buffer += data
        start, size = 0, len(buffer)
        while size - start >= 9:
            end = start + 9 + int.from_bytes(buffer[start : start + 3], "big")
            if end > size:
                break
            kind, flags = buffer[start + 3], buffer[start + 4]
            stream = int.from_bytes(buffer[start + 5 : start + 9], "big")
            if kind == _DATA:
                self._on_data(stream, bytes(buffer[start + 9 : end]))
            elif kind == _SETTINGS and not flags & _ACK:
                self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                self.socket.sendall(_frame(_PING, _ACK, 0, bytes(buffer[start + 9 : end])))
            elif kind == _GOAWAY:
                raise ConnectionError("the server said GOAWAY")
            if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                self._open.discard(stream)
            start = end
        del buffer[:start]
        return bool(self._open)

    def close(self) -> None:
        self.socket.close()

    def _on_data(self, stream: int, data: bytes) -> None:
        data = self._partial.pop(stream, b"") + data
        start = 0
        while len(data) - start >= 5:
            end = start + 5 + int.from_bytes(data[start + 1 : start + 5], "big")
            if end > len(data):
                break
            self.messages += 1
            self.last[stream] = data[start + 5 : end]
            start = end
        if start < len(data):
            self._partial[stream] = data[start:]
