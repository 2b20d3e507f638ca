"""The executor's side of the link's security: CURVE with keys derived from a shared secret, required off loopback."""

from __future__ import annotations

from pathlib import Path

import zmq

from protos.link_address import is_local
from protos.link_keys import LinkKeys, derive, read_secret


class InsecureLink(ValueError):
    """A scheduler address that other machines can listen on, without a secret to tell the right one."""


def link_keys(address: str, secret_file: str | Path | None) -> LinkKeys | None:
    """The keys to connect with, or None for a plain loopback link. Raises InsecureLink, OSError or ValueError."""
    if secret_file is not None:
        return derive(read_secret(secret_file))
    if not is_local(address):
        raise InsecureLink(f"{address} is not on this machine: give --link-secret-file, the scheduler's secret")
    return None


def secure(socket: zmq.Socket[bytes], keys: LinkKeys | None) -> None:
    """Set the CURVE options of a socket that will connect to the scheduler."""
    if keys is not None:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret
