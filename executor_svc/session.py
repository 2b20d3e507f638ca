"""One session with the core: a DEALER socket that is never used again once its peer was lost.

Linger is 0 and the socket never reconnects by itself, so nothing queued for a dead peer reaches a new one.
"""

from __future__ import annotations

import secrets

import zmq
from zmq.utils.monitor import recv_monitor_message

from executor_svc.link_security import secure
from protos.link_keys import LinkKeys
from protos.wire import MAX_FRAME_BYTES

HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 4000  # ZeroMQ's own thread answers: a busy Python never looks dead
CONNECT_TIMEOUT_MS = 5000
GOODBYE_LINGER_MS = 500

_LOST: dict[int, str] = {
    zmq.Event.DISCONNECTED: "disconnected",
    zmq.Event.CLOSED: "cannot connect",
    zmq.Event.CONNECT_RETRIED: "cannot connect",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the scheduler refused the link secret",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "the peer does not speak this protocol, or the link secrets differ",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed: is --link-secret-file the same on both sides?",
}


class Session:
    """``lost`` says why the session is over, or is empty while it lives. Frames, not messages, pass here."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: LinkKeys | None) -> None:
        self.lost = ""
        self.socket = socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.set_hwm(0)  # nothing is dropped silently: the core's depth bounds what can queue
        socket.routing_id = b"e" + secrets.token_bytes(15)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.IPV6, 1)
        secure(socket, keys)
        self.monitor = socket.get_monitor_socket(sum(_LOST))
        try:
            socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def receive(self) -> list[bytes] | None:
        """The parts of the next message, or None if none is queued."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, frame: bytes) -> None:
        """Queue a frame; never waits."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # with no queue limit only a socket without a peer refuses
            self.lost = self.lost or f"cannot send: {error}"

    def watch(self) -> None:
        """Take what the monitor has to say."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if not self.lost:
                self.lost = _LOST.get(event, "")

    def close(self, goodbye: bool = False) -> None:
        """``goodbye``: what was just sent may still leave, within half a second."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=GOODBYE_LINGER_MS if goodbye else 0)
