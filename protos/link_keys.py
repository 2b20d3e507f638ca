"""The CURVE keys of the core-executor link, derived on both sides from one shared secret.

The scheduler listens with the server pair and lets in only the client pair's public key; every executor connects with
the client pair and knows the server's public key. Neither public key is ever published: who can name the server's key
holds the secret. The derivation is part of the protocol: changing it means a new label.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096

_EXTRACT_LABEL = b"stepwire link v1"
_SERVER_LABEL = b"stepwire link v1: scheduler"
_CLIENT_LABEL = b"stepwire link v1: executor"


@dataclass(slots=True, frozen=True)
class LinkKeys:
    """Both key pairs, each key as 40 bytes of Z85 text, as ``zmq.CURVE_*`` socket options take them."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)


def read_secret(path: str | Path) -> bytes:
    """The secret in a file, without a trailing line break. Raises OSError, or ValueError where ``derive`` would."""
    with open(path, "rb") as file:
        data = file.read(MAX_SECRET_BYTES + 3)
    secret = data.rstrip(b"\r\n")
    _check(secret, str(path))
    return secret


def derive(secret: bytes) -> LinkKeys:
    """Both pairs from the shared secret: extract, then expand with one label a pair (the shape of HKDF, by BLAKE2b).

    Raises ValueError for a secret shorter than 16 or longer than 4096 bytes.
    """
    _check(secret, "the link secret")
    root = hashlib.blake2b(secret, key=_EXTRACT_LABEL, digest_size=64).digest()
    server_public, server_secret = _pair(root, _SERVER_LABEL)
    client_public, client_secret = _pair(root, _CLIENT_LABEL)
    return LinkKeys(server_public, server_secret, client_public, client_secret)


def _pair(root: bytes, label: bytes) -> tuple[bytes, bytes]:
    scalar = hashlib.blake2b(label, key=root, digest_size=32).digest()  # X25519 takes any 32 bytes as a secret key
    secret = z85.encode(scalar)
    return zmq.curve_public(secret), secret


def _check(secret: bytes, where: str) -> None:
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ValueError(f"{where}: needs {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, has {len(secret)}")
