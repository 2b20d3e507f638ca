"""Which scheduler to serve, where there are several: one at a time, by need, and faithfully.

::

    no home yet      ask all; the one with the fewest executors of this model, then the most work, is tried first
    home lost        only it is tried, for --rehome-after seconds: a core that is started again needs a few
    still no home    ask all again

One name that stands for several addresses counts as several. With one address nobody is asked anything.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from executor_svc.session import Session
from protos.link_keys import LinkKeys
from protos.step import AskNeed, Need, ToExecutor

log = logging.getLogger(__name__)

REHOME_AFTER = 30.0  # seconds; a core is back within 5
JITTER = 1.0  # seconds, at most: executors that start together must not all choose the same
PATIENCE = 1.0  # seconds for the answers

Ask = Callable[[list[str]], dict[str, Need]]


class Homing:
    """``ask`` returns what those say that answer; see `survey`."""

    def __init__(
        self,
        addresses: Sequence[str],
        ask: Ask,
        rehome_after: float = REHOME_AFTER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not addresses:
            raise ValueError("at least one scheduler address is needed")
        self._addresses = list(addresses)
        self._ask = ask
        self._rehome_after = rehome_after
        self._clock = clock
        self._home = ""  # the newest that welcomed us
        self._lost_at = 0.0
        self._order: list[str] = []  # to be tried, best first

    def next_address(self) -> str:
        """Where to connect now. May take PATIENCE seconds."""
        if self._home and self._clock() - self._lost_at < self._rehome_after:
            return self._home
        if self._home:
            log.warning("the scheduler stays away, looking for another", extra={"scheduler": self._home})
            self._home = ""
        if not self._order:
            self._order = self._by_need()
        return self._order.pop(0)

    def welcomed(self, address: str) -> None:
        self._home, self._order = address, []

    def lost(self) -> None:
        """The session with the home ended."""
        self._lost_at = self._clock()

    def _by_need(self) -> list[str]:
        addresses = [one for address in self._addresses for one in resolve(address)]
        addresses = list(dict.fromkeys(addresses))
        if len(addresses) == 1:
            return addresses
        random.shuffle(addresses)
        needs = self._ask(addresses)
        # Those that say nothing may be down, or of an earlier version: last, but tried.
        answered = sorted((a for a in addresses if a in needs), key=lambda a: (needs[a].executors, -needs[a].requests))
        return answered + [address for address in addresses if address not in needs]


def resolve(address: str) -> list[str]:
    """``tcp://name:port`` -> one such address for each that the name stands for; anything else as it is."""
    transport, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if transport != "tcp" or not host:
        return [address]
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        log.warning("a scheduler's name is not known", extra={"scheduler": address, "error": str(error)})
        return [address]
    hosts = dict.fromkeys(str(entry[4][0]) for entry in found)
    if len(hosts) == 1:
        return [address]
    return [f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts]


def survey(
    context: zmq.Context[zmq.Socket[bytes]],
    addresses: list[str],
    question: AskNeed,
    keys: LinkKeys | None,
    wake: int | None,
) -> dict[str, Need]:
    """Asks all at once, each over a session of its own; returns the answers that came within PATIENCE seconds, or
    until ``wake`` became readable."""
    frame = msgspec.msgpack.encode(question)
    decode = msgspec.msgpack.Decoder(ToExecutor, strict=True).decode
    poller = zmq.Poller()
    if wake is not None:
        poller.register(wake, zmq.POLLIN)
        if dict(poller.poll(int(random.random() * JITTER * 1000))):
            return {}
    sessions: dict[str, Session] = {}
    answers: dict[str, Need] = {}
    try:
        for address in addresses:
            try:
                session = Session(context, address, keys)
            except zmq.ZMQError:
                continue
            sessions[address] = session
            session.send(frame)
            poller.register(session.socket, zmq.POLLIN)
        until = time.monotonic() + PATIENCE
        while len(answers) < len(sessions) and (left := until - time.monotonic()) > 0:
            if wake is not None and wake in dict(poller.poll(int(left * 1000) + 1)):
                break
            if wake is None:
                poller.poll(int(left * 1000) + 1)
            for address, session in sessions.items():
                while (parts := session.receive()) is not None:
                    try:
                        message = decode(parts[0])
                    except msgspec.DecodeError:
                        continue
                    if isinstance(message, Need):
                        answers[address] = message
    finally:
        for session in sessions.values():
            session.close()
    return answers
