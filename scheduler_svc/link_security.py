"""Who may speak on the executor port: CURVE (encrypted, both sides authenticated) with keys derived from one secret.

Core and executors share a secret of at least 16 bytes. Both key pairs are derived from it (``protos.link_keys``), so
there is nothing else to hand out: an executor proves that it knows the secret, and so does the core. Without a secret
the port binds to loopback only.
"""

from __future__ import annotations

from types import TracebackType

import zmq
from zmq.auth.thread import ThreadAuthenticator

from protos.link_address import check_link_address, is_local
from protos.link_keys import derive

ZAP_DOMAIN = "stepwire-executors"


class InsecureAddress(ValueError):
    """An address that other machines can reach, without a secret: refused before anything is bound."""


def require_secure(address: str, secret: bytes | None) -> None:
    """Raise InsecureAddress unless `address` is local or there is a secret, ValueError where it is none."""
    check_link_address("--listen", address, listens=True)
    if not secret and not is_local(address):
        raise InsecureAddress(
            f"{address} can be reached from other machines: give --link-secret-file, or listen on tcp://127.0.0.1:PORT"
        )


class LinkGuard:
    """ZAP authentication of one ZeroMQ context: only the client key derived from the secret may connect.

    ZeroMQ asks one handler a context, on a thread of its own; ``close()`` ends it, and must come before the
    context's end.
    """

    def __init__(self, context: zmq.Context, allowed: bytes) -> None:
        self._allowed = allowed
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the ZAP thread with a client's public key (Z85)."""
        return domain == ZAP_DOMAIN and key == self._allowed

    def close(self) -> None:
        if self._thread.is_alive():
            self._thread.stop()

    def __enter__(self) -> LinkGuard:
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def apply_server(context: zmq.Context, socket: zmq.Socket, secret: bytes) -> LinkGuard:
    """Make `socket` (not bound yet) a CURVE server that lets in only executors that know `secret`.

    Returns the guard; close it before the context.
    """
    keys = derive(secret)
    guard = LinkGuard(context, keys.client_public)
    socket.zap_domain = ZAP_DOMAIN.encode()
    socket.curve_secretkey = keys.server_secret
    socket.curve_publickey = keys.server_public
    socket.curve_server = True
    return guard
