"""Addresses that the gRPC API and the metrics listen on, as the command lines take them."""

from __future__ import annotations

from protos.link_address import MAX_PORT


def host_port(flag: str, text: str) -> tuple[str, int]:
    """``HOST:PORT`` -> both, brackets of an IPv6 address taken off. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise ValueError(f"{flag} {text}: must be HOST:PORT, with a port of at most {MAX_PORT}")
    return host.strip("[]"), int(port)
