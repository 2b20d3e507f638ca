"""The executor port: only those who know the secret get a word in, and no secret means loopback only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from protos.link_address import check_link_address, is_local
from protos.link_keys import LinkKeys, derive
from scheduler_svc.link_security import InsecureAddress, apply_server, require_secure

SECRET = b"sixteen bytes or more"


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def _dealer(context: zmq.Context, port: int, keys: LinkKeys | None) -> tuple[zmq.Socket, zmq.Socket]:
    """A connecting DEALER and the monitor of its handshakes."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys is not None:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret
    monitor = socket.get_monitor_socket()
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket, monitor


def _wait_for(monitor: zmq.Socket, wanted: set[int]) -> int:
    while True:
        assert monitor.poll(10_000), "no handshake event"
        event = recv_monitor_message(monitor)["event"]
        if event in wanted:
            return int(event)


def test_a_client_with_the_secret_is_heard(context: zmq.Context) -> None:
    server = context.socket(zmq.ROUTER)
    with apply_server(context, server, SECRET):
        port = server.bind_to_random_port("tcp://127.0.0.1")
        socket, _ = _dealer(context, port, derive(SECRET))
        socket.send(b"hello")
        assert server.poll(10_000)
        assert server.recv_multipart()[1] == b"hello"


def _with_own_client_key() -> LinkKeys:
    """Knows the server's public key, but has a client pair of its own."""
    right, other = derive(SECRET), derive(b"another secret, long")
    return LinkKeys(right.server_public, b"", other.client_public, other.client_secret)


@pytest.mark.parametrize("keys", [_with_own_client_key(), derive(b"another secret, long"), None])
def test_anyone_else_is_not(context: zmq.Context, keys: LinkKeys | None) -> None:
    server = context.socket(zmq.ROUTER)
    with apply_server(context, server, SECRET):
        port = server.bind_to_random_port("tcp://127.0.0.1")
        socket, monitor = _dealer(context, port, keys)
        with contextlib.suppress(zmq.Again):  # refused already: no pipe is left to send into
            socket.send(b"hello", zmq.NOBLOCK)
        refused = {
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            zmq.EVENT_DISCONNECTED,
        }
        assert _wait_for(monitor, refused | {zmq.EVENT_HANDSHAKE_SUCCEEDED}) in refused
        # Whoever knows the secret is still heard, and nobody else was.
        friend, _ = _dealer(context, port, derive(SECRET))
        friend.send(b"friend")
        assert server.poll(10_000)
        assert server.recv_multipart()[1] == b"friend"
        assert not server.poll(0)


LOCAL = [
    "tcp://127.0.0.1:5600",
    "tcp://127.8.0.1:1",
    "tcp://[::1]:5600",
    "tcp://localhost:5600",
    "ipc:///x",
    "inproc://x",
]
REMOTE = [
    "tcp://0.0.0.0:5600",
    "tcp://*:5600",
    "tcp://[::]:5600",
    "tcp://10.0.0.1:5600",
    "tcp://eth0:5600",
    "tcp://box:1",
]


@pytest.mark.parametrize("address", LOCAL)
def test_local_addresses_need_no_secret(address: str) -> None:
    assert is_local(address)
    require_secure(address, None)


@pytest.mark.parametrize("address", REMOTE)
def test_other_addresses_do(address: str) -> None:
    assert not is_local(address)
    require_secure(address, SECRET)
    for secret in (None, b""):
        with pytest.raises(InsecureAddress, match="--link-secret-file") as caught:
            require_secure(address, secret)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5600", "tcp://[::1]:0", "tcp://*:*", "ipc:///run/s", "inproc://x"]
)
def test_addresses_of_the_link(address: str) -> None:
    check_link_address("--executors", address, listens=True)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:5600", "tcp://127.0.0.1", "tcp://:5600", "tcp://h:65536", "tcp://h:-1", "udp://h:1", "ipc://", ""],
)
def test_what_is_no_address_is_refused_by_name(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--executors {address}: must be tcp://HOST:PORT")):
        check_link_address("--executors", address, listens=True)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:0"])
def test_nobody_connects_to_any_free_port(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--scheduler {address}: must be")):
        check_link_address("--scheduler", address)
