"""TLS for the gRPC ports, from PEM files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.link_address import is_loopback


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """``client_ca``: clients must show a certificate that it signed (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises ValueError where a file cannot be read, or is no PEM."""
        key = _pem(self.key, b"PRIVATE KEY")
        certificate = _pem(self.certificate, b"CERTIFICATE")
        ca = _pem(self.client_ca, b"CERTIFICATE") if self.client_ca is not None else None
        return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=ca is not None)


def _pem(path: Path, kind: bytes) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if b"-----BEGIN " not in data or kind not in data:
        raise ValueError(f"{path}: no {kind.decode().lower()} in PEM form")
    return data


def is_local(address: str) -> bool:
    """True where only this machine can reach a gRPC address: a Unix socket, or a loopback address."""
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])
