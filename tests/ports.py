"""Loopback ports that nobody else gets, for services that are told where to listen."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """A port of 127.0.0.1 that stays reserved while this process lives.

    It is bound here and never listened on: a service that sets SO_REUSEADDR (ZeroMQ, gRPC and ``http.server`` do) can
    listen on it, again and again, while the kernel gives it to nobody who asks for any port: to no other test process,
    and to no outgoing connection (one to the port itself, while nobody listens, would be connected to itself).
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])
