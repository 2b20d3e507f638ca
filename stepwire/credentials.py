"""What a channel needs to be trusted and to trust: a CA, a client certificate, an API key."""

from __future__ import annotations

from pathlib import Path

import grpc


def tls(
    ca: str | Path | None = None, certificate: str | Path | None = None, key: str | Path | None = None
) -> grpc.ChannelCredentials:
    """Credentials of a TLS channel, from PEM files. `ca`: who signed the server (absent: the system's own list);
    `certificate` and `key`: what this client shows, where the server asks for it. Raises ValueError, OSError."""
    if (certificate is None) != (key is None):
        raise ValueError("a client certificate and its key go together")
    roots, chain, private = (None if path is None else Path(path).read_bytes() for path in (ca, certificate, key))
    return grpc.ssl_channel_credentials(roots, private, chain)


def bearer(api_key: str) -> tuple[tuple[str, str], ...]:
    """Metadata that shows an API key."""
    return (("authorization", f"Bearer {api_key}"),)
