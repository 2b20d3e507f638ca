"""Frames that nobody should send, to both sockets of the core: counted, bounded, and the service goes on."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from protos import step
from protos.wire import MAX_FRAME_BYTES
from tests.e2e.process import TIMEOUT, Process, bounded
from tests.e2e.status import StatusClient
from tests.fuzz.frames import hostile_hello, load, mutated

SEED = 20260731
_encode = msgspec.msgpack.Encoder().encode


class Service:
    """The core as a process of its own, whose memory is nobody else's."""

    def __init__(self, folder: Path) -> None:
        self.front = f"ipc://{folder}/front"
        args = ["-m", "scheduler_svc.core", "--listen", "tcp://127.0.0.1:0", "--front", self.front]
        self._process = Process(
            "core", [*args, "--startup-grace", "0", "--wait-for-executor", "0.2"], folder / "core.log"
        )
        self.executors = self._process.wait_log(r"executors=(tcp://\S+)").group(1)
        self.context = zmq.Context()
        self._status = StatusClient(self.front)

    def dealer(self, address: str) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, int(TIMEOUT * 1000))
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.connect(address)
        return dealer

    def status(self, check: bool = True) -> dict[str, Any]:
        """Asked over the workers' socket: a service that answers is one that goes on."""
        body = self._status.get(check_invariants=check)
        assert self._process.alive
        assert body.get("problems", []) == []
        return body

    def resident(self) -> int:
        """Bytes of memory."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * 4096

    def close(self) -> None:
        try:
            self.status()
        finally:
            self._status.close()
            self._process.stop()
            self.context.destroy(linger=0)
        assert self._process.popen.returncode == 0
        assert "Traceback" not in self._process.text()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def hurl(service: Service, address: str, frames: list[bytes], rng: random.Random) -> None:
    """Sends frames over a few connections, each of which begins anew now and then."""
    dealer = service.dealer(address)
    for frame in frames:
        if rng.random() < 0.05:
            dealer.close()
            dealer = service.dealer(address)
        dealer.send_multipart([frame] * rng.choice([1, 1, 1, 1, 1, 2, 3]))
        while dealer.poll(0):
            dealer.recv_multipart()
    dealer.close()


def until_gone(service: Service) -> dict[str, Any]:
    """What the connections left behind goes with them."""
    for _ in bounded(TIMEOUT, lambda: f"still there: {service.status(check=False)}"):
        status = service.status(check=False)
        if not status["executors"] and not status["workers"]:
            break
    return service.status()


@pytest.mark.parametrize("kind", ["step", "front"])
def test_random_frames(service: Service, kind: str) -> None:
    rng = random.Random(SEED)
    corpus = load(kind)
    address = service.executors if kind == "step" else service.front
    hurl(service, address, corpus, rng)
    service.status()
    before = service.resident()
    for _ in range(3):
        hurl(service, address, [mutated(rng, corpus) for _ in range(700)], rng)
        service.status()
    status = until_gone(service)
    assert status["counters"]["malformed"] > 500
    assert service.resident() - before < 64 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["step", "front"])
@pytest.mark.parametrize("seed", range(10))
def test_many_random_frames(service: Service, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    corpus = load(kind)
    address = service.executors if kind == "step" else service.front
    for _ in range(10):
        hurl(service, address, [mutated(rng, corpus) for _ in range(1000)], rng)
        service.status()
    until_gone(service)


def test_frames_that_are_too_large_end_their_connection(service: Service) -> None:
    good = service.dealer(service.executors)
    bad = service.dealer(service.executors)
    bad.setsockopt(zmq.RECONNECT_IVL, -1)
    ended = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    bad.send(bytes(MAX_FRAME_BYTES + 1))
    assert ended.poll(TIMEOUT * 1000), "the connection stays"
    bad.disable_monitor()
    ended.close(linger=0)
    bad.close(linger=0)
    good.send(_encode(hostile_hello("good")))
    assert good.poll(TIMEOUT * 1000)
    message = msgspec.msgpack.decode(good.recv(), type=step.ToExecutor)
    assert isinstance(message, step.Welcome)
    good.close()
    assert until_gone(service)["counters"]["disconnects"] >= 1


def test_bytes_that_are_not_zeromq(service: Service) -> None:
    host, port = service.executors.removeprefix("tcp://").split(":")
    rng = random.Random(SEED)
    for size in (1, 10, 64, 1000, 100_000):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as raw, contextlib.suppress(ConnectionError):
            raw.sendall(rng.randbytes(size))  # it may hang up before it has all of them
    service.status()


def test_a_hello_of_another_version_is_refused(service: Service) -> None:
    dealer = service.dealer(service.executors)
    dealer.send(_encode(hostile_hello(versions=(7, 8))))
    assert dealer.poll(TIMEOUT * 1000)
    message = msgspec.msgpack.decode(dealer.recv(), type=step.ToExecutor)
    assert isinstance(message, step.Refused)
    assert "protocol versions" in message.reason
    dealer.close()


def test_the_largest_hello_sizes_nothing(service: Service) -> None:
    before = service.resident()
    dealers = [service.dealer(service.executors) for _ in range(8)]
    largest = step.Limits(2**26, 1024, 65536, 2**20, 64)
    for i, dealer in enumerate(dealers):
        dealer.send(_encode(hostile_hello(f"h{i}", instance=i, limits=largest)))
    for dealer in dealers:
        assert dealer.poll(TIMEOUT * 1000)
    assert len(service.status(check=False)["executors"]) == 8
    grown = service.resident() - before
    assert grown < 512 * 2**20, f"{grown / 2**20:.0f} MiB"
    for dealer in dealers:
        dealer.close()
    until_gone(service)
