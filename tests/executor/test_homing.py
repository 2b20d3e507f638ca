"""Which scheduler an executor serves, where there are several."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from executor_svc import homing
from executor_svc.homing import REHOME_AFTER, Homing, resolve, survey
from protos.step import AskNeed, Need, ToCore

A, B, C = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_one_with_the_fewest_executors_then_the_most_work_comes_first() -> None:
    needs = {A: Need(2, 50), B: Need(1, 3), C: Need(1, 9)}
    home = Homing([A, B, C], lambda addresses: needs)
    assert [home.next_address() for _ in range(3)] == [C, B, A]


def test_those_that_say_nothing_are_tried_last() -> None:
    home = Homing([A, B], lambda addresses: {B: Need(7, 0)})
    assert [home.next_address() for _ in range(3)] == [B, A, B]


def test_one_address_is_asked_nothing() -> None:
    def ask(addresses: list[str]) -> dict[str, Need]:
        raise AssertionError("asked")

    assert Homing([A], ask).next_address() == A


def test_a_home_that_is_away_is_waited_for() -> None:
    clock = Clock()
    needs = {A: Need(0, 1), B: Need(0, 0)}
    home = Homing([A, B], lambda addresses: needs, clock=clock)
    home.welcomed(home.next_address())
    home.lost()
    needs[A] = Need(9, 0)
    clock.now += REHOME_AFTER - 0.1
    assert home.next_address() == A
    clock.now += 0.2
    assert home.next_address() == B
    assert home.next_address() == A, "and the others after that"


def test_a_name_of_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, 0, 0, "", ("10.0.0.1", 5600)), (socket.AF_INET6, 0, 0, "", ("fd00::2", 5600, 0, 0))]
    monkeypatch.setattr(homing.socket, "getaddrinfo", lambda *args, **options: found)
    assert resolve("tcp://scheduler:5600") == ["tcp://10.0.0.1:5600", "tcp://[fd00::2]:5600"]
    monkeypatch.setattr(homing.socket, "getaddrinfo", lambda *args, **options: found[:1])
    assert resolve("tcp://scheduler:5600") == ["tcp://scheduler:5600"]
    assert resolve("ipc:///x") == ["ipc:///x"]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def test_all_are_asked_at_once(context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One answers, one is of an earlier version and says nothing, one is not there."""
    monkeypatch.setattr(homing, "JITTER", 0.0)
    routers = [context.socket(zmq.ROUTER) for _ in range(2)]
    addresses = [f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}" for router in routers]
    wake, end = socket.socketpair()
    try:
        over, questions = threading.Event(), []

        def answer() -> None:
            while not over.is_set():
                if routers[0].poll(10):
                    peer, frame = routers[0].recv_multipart()
                    questions.append(msgspec.msgpack.decode(frame, type=ToCore))
                    routers[0].send_multipart((peer, msgspec.msgpack.encode(Need(3, 4))))

        thread = threading.Thread(target=answer)
        thread.start()
        for patience in (0.3, 3.0, 30.0):  # longer, where the machine is so busy that the answer is late
            monkeypatch.setattr(homing, "PATIENCE", patience)
            answers = survey(context, [*addresses, "tcp://127.0.0.1:9"], AskNeed("tiny"), None, wake.fileno())
            if answers:
                break
        over.set()
        thread.join()
        assert answers == {addresses[0]: Need(3, 4)}
        assert set(questions) == {AskNeed("tiny")}
    finally:
        wake.close()
        end.close()
        for router in routers:
            router.close(linger=0)
