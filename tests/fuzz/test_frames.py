"""Frames that nobody should send, to both sockets of the core: counted, bounded, and the service goes on."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from protos import front, step
from protos.wire import MAX_FRAME_BYTES
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.loop import Shell, steady_clock
from tests.fuzz.frames import hostile_hello, load, mutated

SEED = 20260731
_encode = msgspec.msgpack.Encoder().encode
_from_core = msgspec.msgpack.Decoder(front.ToWorker).decode


class Service:
    """The core behind its real sockets, in a thread."""

    def __init__(self, folder: Path) -> None:
        clock = steady_clock()
        self.core = Core(CoreConfig(startup_grace=0.0, wait_for_executor=0.2), clock())
        self.front = f"ipc://{folder}/front"
        self.shell = Shell(self.core, "tcp://127.0.0.1:0", self.front, None, None)
        self.context = zmq.Context()
        self._thread = threading.Thread(target=self.shell.run, args=(clock,))
        self._thread.start()
        self._ticket = 0

    def dealer(self, address: str) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 5000)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.connect(address)
        return dealer

    def status(self, check: bool = True) -> dict[str, object]:
        """Asked over the workers' socket: a service that answers is one that goes on."""
        assert self._thread.is_alive(), "the core's thread died"
        asking = self.dealer(self.front)
        try:
            self._ticket += 1
            asking.send(_encode(front.GetStatus(self._ticket, "", check)))
            assert asking.poll(20_000), "no answer"
            body = _from_core(asking.recv()).body  # type: ignore[union-attr]
        finally:
            asking.close(linger=0)
        assert body.get("problems", []) == []
        return body

    def close(self) -> None:
        self.shell.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()
        assert not check_all(self.core)
        self.shell.close()
        self.context.destroy(linger=0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


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


def until_gone(service: Service) -> dict[str, object]:
    """What the connections left behind goes with them."""
    deadline = time.monotonic() + 20
    while (status := service.status(check=False))["executors"] or status["workers"]:
        assert time.monotonic() < deadline, status
    return service.status()


@pytest.mark.parametrize("kind", ["step", "front"])
def test_random_frames(service: Service, kind: str) -> None:
    rng = random.Random(SEED)
    corpus = load(kind)
    address = service.shell.listening if kind == "step" else service.front
    hurl(service, address, corpus, rng)
    service.status()
    before = resident()
    for _ in range(3):
        hurl(service, address, [mutated(rng, corpus) for _ in range(700)], rng)
        service.status()
    status = until_gone(service)
    assert status["counters"]["malformed"] > 500  # type: ignore[index]
    assert resident() - before < 64 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["step", "front"])
@pytest.mark.parametrize("seed", range(10))
def test_many_random_frames(service: Service, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    corpus = load(kind)
    address = service.shell.listening if kind == "step" else service.front
    for _ in range(10):
        hurl(service, address, [mutated(rng, corpus) for _ in range(1000)], rng)
        service.status()
    until_gone(service)


def test_frames_that_are_too_large_end_their_connection(service: Service) -> None:
    good = service.dealer(service.shell.listening)
    bad = service.dealer(service.shell.listening)
    bad.setsockopt(zmq.RECONNECT_IVL, -1)
    ended = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    bad.send(bytes(MAX_FRAME_BYTES + 1))
    assert ended.poll(20_000), "the connection stays"
    bad.disable_monitor()
    ended.close(linger=0)
    bad.close(linger=0)
    good.send(_encode(hostile_hello("good")))
    assert good.poll(20_000)
    message = msgspec.msgpack.decode(good.recv(), type=step.ToExecutor)
    assert isinstance(message, step.Welcome)
    good.close()
    assert until_gone(service)["counters"]["disconnects"] >= 1  # type: ignore[index]


def test_bytes_that_are_not_zeromq(service: Service) -> None:
    host, port = service.shell.listening.removeprefix("tcp://").split(":")
    rng = random.Random(SEED)
    for size in (1, 10, 64, 1000, 100_000):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(rng.randbytes(size))
    service.status()


def test_a_hello_of_another_version_is_refused(service: Service) -> None:
    dealer = service.dealer(service.shell.listening)
    dealer.send(_encode(hostile_hello(versions=(7, 8))))
    assert dealer.poll(20_000)
    message = msgspec.msgpack.decode(dealer.recv(), type=step.ToExecutor)
    assert isinstance(message, step.Refused)
    assert "protocol versions" in message.reason
    dealer.close()


def test_the_largest_hello_sizes_nothing(service: Service) -> None:
    before = resident()
    dealers = [service.dealer(service.shell.listening) for _ in range(8)]
    largest = step.Limits(2**26, 1024, 65536, 2**20, 64)
    for i, dealer in enumerate(dealers):
        dealer.send(_encode(hostile_hello(f"h{i}", instance=i, limits=largest)))
    for dealer in dealers:
        assert dealer.poll(20_000)
    assert len(service.status(check=False)["executors"]) == 8  # type: ignore[arg-type]
    grown = resident() - before
    assert grown < 512 * 2**20, f"{grown / 2**20:.0f} MiB"
    for dealer in dealers:
        dealer.close()
    until_gone(service)
