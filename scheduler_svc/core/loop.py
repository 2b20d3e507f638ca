"""The shell around the core: sockets, a clock, and nothing that decides anything.

One turn: wait for a frame or the core's next deadline; apply what waits (executors first); let the core plan; send.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import zmq

from protos import front, step
from protos.wire import MAX_FRAME_BYTES, WireError
from scheduler_svc import link_security
from scheduler_svc.core import garbage
from scheduler_svc.core.core import Core
from scheduler_svc.core.crash_ledger import LedgerFile
from scheduler_svc.core.fault_injection import FaultInjector
from scheduler_svc.core.outbox import EXECUTOR, WORKER, Destination, Message
from scheduler_svc.core.tenant_limits import LimitsFile
from scheduler_svc.core.trials import Trials
from scheduler_svc.reloaded import INTERVAL, Reloaded

# From each socket, so that neither starves the other or the plans, and no turn is long.
EXECUTOR_FRAMES_A_TURN = 16
WORKER_FRAMES_A_TURN = 32
_LONGEST_WAIT = 1.0  # seconds
_STALL = 0.5  # seconds more that a turn took: others' silence in that time says nothing about them
_ENDINGS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Shell:
    """Owns both sockets. ``secret`` (for a listener off loopback) encrypts and authenticates the executor link."""

    def __init__(
        self,
        core: Core,
        listen: str,
        front_endpoint: str,
        secret: bytes | None,
        injector: FaultInjector | None,
        limits: Reloaded[LimitsFile] | None = None,
        ledger: LedgerFile | None = None,
    ) -> None:
        link_security.require_secure(listen, secret)
        self.core = core
        self._injector = injector
        self._limits = limits
        self._limits_seen = 0.0
        self._ledger = ledger
        self._context = zmq.Context()
        self._executors = self._router()
        self._guard = link_security.apply_server(self._context, self._executors, secret) if secret else None
        self._executors.bind(listen)
        self._workers = self._router()
        self._workers.bind(front_endpoint)
        self._monitors = {
            EXECUTOR: self._executors.get_monitor_socket(_ENDINGS),
            WORKER: self._workers.get_monitor_socket(_ENDINGS),
        }
        self.listening = self._executors.getsockopt_string(zmq.LAST_ENDPOINT)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_step = msgspec.msgpack.Decoder(step.ToCore).decode
        self._decode_front = msgspec.msgpack.Decoder(front.ToCore).decode
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._stopping = False

    def stop(self) -> None:
        """End `run` soon. Safe in a signal handler and from another thread."""
        self._stopping = True
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            self._wake_writer.send(b"\0")

    def stop_on_signals(self) -> None:
        def handler(number: int, frame: FrameType | None) -> None:
            self.stop()

        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    def run(self, clock: Callable[[], float]) -> None:
        poller = zmq.Poller()
        poller.register(self._executors, zmq.POLLIN)
        poller.register(self._workers, zmq.POLLIN)
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        for monitor in self._monitors.values():
            poller.register(monitor, zmq.POLLIN)
        core = self.core
        turned = clock()
        trials = Trials(core, self._ledger, self._answer, turned) if self._ledger is not None else None
        on_front = core.on_front if trials is None else trials.on_front
        while not self._stopping:
            deadline = core.next_deadline()
            wait = _LONGEST_WAIT if deadline is None else min(max(deadline - clock(), 0.0), _LONGEST_WAIT)
            ready = dict(poller.poll(int(wait * 1000) + (wait > 0)))
            now = clock()
            if now - turned > _LONGEST_WAIT + _STALL:
                core.on_stall(now)
            turned = now
            if self._executors in ready:
                self._receive(self._executors, EXECUTOR_FRAMES_A_TURN, self._decode_step, core.on_executor, now)
            if self._workers in ready:
                self._receive(self._workers, WORKER_FRAMES_A_TURN, self._decode_front, on_front, now)
            for kind, monitor in self._monitors.items():
                if monitor in ready:
                    self._count_endings(kind, monitor, now)
            deadline = core.next_deadline()
            if deadline is not None and deadline <= now:
                core.on_tick(now)
            self._look_at_limits(now)
            if trials is not None:
                trials.turn(now)
            core.advance(now)
            self._send_all(clock)
            garbage.collect_if_worth(quiet=not ready)
        if trials is not None:
            trials.stopped()

    def close(self) -> None:
        for router in (self._executors, self._workers):
            router.disable_monitor()
        for monitor in self._monitors.values():
            monitor.close(linger=0)
        self._executors.close(linger=0)
        self._workers.close(linger=0)
        if self._guard is not None:
            self._guard.close()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()

    def _answer(self, peer: bytes, message: front.Failed) -> None:
        """Beside the core. A worker that is gone needs none."""
        self._send(Destination(WORKER, peer), message)

    def _look_at_limits(self, now: float) -> None:
        if self._limits is not None and now - self._limits_seen >= INTERVAL:
            self._limits_seen = now
            if self._limits.changed():
                self.core.on_limits(self._limits.settings)

    # -- frames ------------------------------------------------------------------------------------------------------

    def _receive(
        self,
        source: zmq.Socket[bytes],
        most: int,
        decode: Callable[[bytes], Any],
        apply: Callable[[bytes, Any, float], None],
        now: float,
    ) -> None:
        for _ in range(most):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                self.core.on_malformed()
                continue
            try:
                message = decode(frames[1])
            except (msgspec.DecodeError, WireError, RecursionError):
                self.core.on_malformed()
                continue
            apply(frames[0], message, now)

    def _count_endings(self, kind: str, monitor: zmq.Socket[bytes], now: float) -> None:
        """Connections that ended, those that ZeroMQ cut off (oversized frame, failed handshake) among them."""
        while monitor.poll(0):
            monitor.recv_multipart(zmq.NOBLOCK)
            self.core.on_disconnect(kind, now)

    def _send_all(self, clock: Callable[[], float]) -> None:
        while items := self.core.take_outbox():
            if self._injector is not None:
                items = self._injector.apply(items)
            gone: dict[Destination, None] = {}
            for destination, message in items:
                if destination not in gone and not self._send(destination, message):
                    gone[destination] = None
            for destination in gone:
                lost = self.core.on_session_gone if destination.kind == EXECUTOR else self.core.on_worker_gone
                lost(destination.peer, clock())
            if gone:
                self.core.advance(clock())

    def _send(self, destination: Destination, message: Message) -> bool:
        """Returns False when the peer is not there any more."""
        target = self._executors if destination.kind == EXECUTOR else self._workers
        try:
            target.send_multipart((destination.peer, self._encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _router(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, 0)
        router.setsockopt(zmq.RCVHWM, 0)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        router.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        router.setsockopt(zmq.HEARTBEAT_TTL, 3000)
        return router


def steady_clock() -> Callable[[], float]:
    """Unix seconds that never run backwards: the wall clock's at start, then the monotonic clock's pace."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


def make_ipc_directory(endpoint: str) -> None:
    """The directory of an ipc socket, for this user only. (A path left by an earlier core is bound over by ZeroMQ.)"""
    if endpoint.startswith("ipc://") and not endpoint.startswith("ipc://@"):
        directory = os.path.dirname(endpoint[len("ipc://") :])
        if directory:
            os.makedirs(directory, mode=0o700, exist_ok=True)
