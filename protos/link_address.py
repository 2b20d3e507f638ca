"""Addresses of the core-executor link, as both sides take them on their command lines."""

from __future__ import annotations

MAX_PORT = 65535


def check_link_address(flag: str, address: str) -> None:
    """Raise ValueError unless ``address`` is ``tcp://HOST:PORT``, ``ipc://PATH`` or ``inproc://NAME``.

    ZeroMQ itself takes a port's number modulo 65536, and would listen on, or wait for ever for, another one.
    """
    transport, _, rest = address.partition("://")
    if transport in ("ipc", "inproc") and rest:
        return
    host, _, port = rest.rpartition(":")
    numbered = port.isascii() and port.isdecimal() and int(port) <= MAX_PORT
    if transport != "tcp" or not host or not (numbered or port == "*"):
        raise ValueError(f"{flag} {address}: must be tcp://HOST:PORT, with a port of at most {MAX_PORT}")
