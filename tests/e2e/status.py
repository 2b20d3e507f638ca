"""Asks the core for its status over the front socket, as an API worker does."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import zmq

from protos import front


class StatusClient:
    """One DEALER socket; not shared between threads."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(front.ToWorker).decode
        self._ticket = 0
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def _open(self) -> zmq.Socket[bytes]:
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.connect(self._endpoint)
        return self._socket

    def get(self, timeout: float = 60.0, **query: Any) -> dict[str, Any]:
        """The body of ``Status``. A core that restarts meanwhile is asked again. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._ticket += 1
            socket = self._open()
            socket.send(self._encode(front.GetStatus(ticket=self._ticket, **query)))
            again = time.monotonic() + 2.0
            while (now := time.monotonic()) < min(again, deadline):
                if not socket.poll(int((min(again, deadline) - now) * 1000) + 1):
                    break
                message = self._decode(socket.recv_multipart()[-1])
                if isinstance(message, front.Status) and message.ticket == self._ticket:
                    return dict(message.body)
            self._close_socket()  # a new socket for a new core: nothing queued for the old one
        raise TimeoutError(f"no status from {self._endpoint} in {timeout} s")

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self._close_socket()
        self._context.term()


def attach(name: str) -> front.Attach:
    return front.Attach(version=front.FRONT_VERSION, worker=name, incarnation=int.from_bytes(os.urandom(7), "little"))
