"""Addresses of the core-executor link, as both sides take them on their command lines."""

from __future__ import annotations

import ipaddress

MAX_PORT = 65535


def check_link_address(flag: str, address: str, *, listens: bool = False) -> None:
    """Raise ValueError unless ``address`` is ``tcp://HOST:PORT``, ``ipc://PATH`` or ``inproc://NAME``. ``listens``: the
    port may be ``*`` or 0, any that is free.

    ZeroMQ itself takes a port's number modulo 65536, and would listen on, or wait for ever for, another one.
    """
    transport, _, rest = address.partition("://")
    if transport in ("ipc", "inproc") and rest:
        return
    host, _, port = rest.rpartition(":")
    numbered = port.isascii() and port.isdecimal() and (0 if listens else 1) <= int(port) <= MAX_PORT
    if transport != "tcp" or not host or not (numbered or (listens and port == "*")):
        raise ValueError(f"{flag} {address}: must be tcp://HOST:PORT, with a port of at most {MAX_PORT}")


def is_local(address: str) -> bool:
    """True where only this machine can be at the other end: ipc, inproc, or tcp on a loopback address."""
    transport, _, rest = address.partition("://")
    return transport in ("ipc", "inproc") or (transport == "tcp" and is_loopback(rest.rpartition(":")[0]))


def is_loopback(host: str) -> bool:
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, which may resolve to anything, an interface's, or "*"
        return False
