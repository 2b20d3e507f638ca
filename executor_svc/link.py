"""The executor's end of the core-executor link: sessions that come and go under a service that stays.

``next_plan`` is the only way in: it hands out plans in the order received and serves everything else on the way
(welcomes, assets, pings, drain). ``send`` is the only way out. One thread uses it.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import zmq

from executor_svc.assets import AssetStore
from executor_svc.homing import REHOME_AFTER, Homing, survey
from executor_svc.session import Session
from protos.link_keys import LinkKeys
from protos.step import (
    PROTOCOL_VERSIONS,
    AskNeed,
    Drain,
    Draining,
    EpochLost,
    Failed,
    FetchAsset,
    Forget,
    Goodbye,
    Hello,
    Load,
    Need,
    Ping,
    Prepare,
    Refused,
    Rehello,
    StepPlan,
    StepResult,
    ToCore,
    ToExecutor,
    Welcome,
)
from protos.wire import Epoch

log = logging.getLogger(__name__)

SILENCE_LIMIT = 4.0  # seconds without a frame, while listening: the core pings four times a second
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 0.5  # seconds, doubled each time, each shortened at random by up to half
LOAD_INTERVAL = 1.0  # seconds


class Link:
    """Connects, says hello, and reconnects for ever.

    ``addresses``: the scheduler's, or several, of which one is served at a time (homing.py).
    ``on_epoch`` is called for each Welcome, before any plan of that epoch is handed out; ``load`` for the numbers that
    go to the core about once a second. ``wake`` is a file descriptor that ends a wait when it becomes readable.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        hello: Hello,
        assets: AssetStore,
        on_epoch: Callable[[Epoch], None],
        load: Callable[[], Load],
        keys: LinkKeys | None = None,
        wake: int | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        rehome_after: float = REHOME_AFTER,
    ) -> None:
        self.hello = hello
        self.assets = assets
        self.on_epoch = on_epoch
        self.load = load
        self.keys = keys
        self.wake = wake
        self.epoch: Epoch | None = None  # of the newest Welcome of the session that lives now
        self.drained = False  # the core sent Drain: no plan will follow
        self.counts: Counter[str] = Counter()  # sessions, malformed, ignored_plans, unsent ...
        self._context = context or zmq.Context()
        self._own_context = context is None
        self._homing = Homing([addresses] if isinstance(addresses, str) else addresses, self._ask, rehome_after)
        self._address = ""  # of the newest session
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToExecutor, strict=True)
        self._session: Session | None = None
        self._backoff = FIRST_BACKOFF
        self._next_connect = 0.0
        self._heard = 0.0
        self._next_load = 0.0
        self._draining = False

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Welcomed, and not lost since."""
        return self._session is not None and self.epoch is not None

    def next_plan(self, timeout: float = 0.0) -> StepPlan | None:
        """The next plan of the epoch that lives; None when none came within ``timeout`` seconds, or woken."""
        deadline = time.monotonic() + timeout
        while True:
            if self._session is not None:
                plan = self._next_queued(self._session)
                if plan is not None:
                    self._report(self._heard)
                    return plan
            now = time.monotonic()
            self._keep_up(now)
            if self.drained or now >= deadline:
                return None
            if self._wait(min(deadline, self._next_event(now)) - now):
                return None

    def send(self, message: ToCore) -> None:
        """Queue a message. Results of an epoch that no longer lives have no reader: they are counted, not sent."""
        if isinstance(message, StepResult | EpochLost) and message.epoch != self.epoch:
            self.counts["unsent"] += 1
        elif self._session is not None:
            self._session.send(self._encoder.encode(message))

    def announce_draining(self) -> None:
        """Tell this and every later session's core that this executor wants to leave."""
        self._draining = True
        if self.connected:
            self.send(Draining())

    def close(self, reason: str) -> None:
        """Say goodbye where anybody listens, and end."""
        if self._session is not None:
            self.send(Goodbye(reason))
            self._session.close(goodbye=True)
            self._session = None
        if self._own_context:
            self._context.term()

    # ----------------------------------------------------------------------------------------------------------------
    # Messages

    def _next_queued(self, session: Session) -> StepPlan | None:
        """Read what is queued up to the next plan."""
        while session is self._session and not self.drained:
            parts = session.receive()
            if parts is None:
                return None
            self._heard = time.monotonic()
            message = self._decode(parts)
            if isinstance(message, StepPlan):
                if message.epoch == self.epoch:
                    return message
                self.counts["ignored_plans"] += 1
            elif message is not None:
                self._serve(message)
        return None

    def _decode(self, parts: list[bytes]) -> ToExecutor | None:
        try:
            if len(parts) != 1:
                raise msgspec.DecodeError(f"{len(parts)} parts")
            message: ToExecutor = self._decoder.decode(parts[0])
            return message
        except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
            self.counts["malformed"] += 1
            if self.counts["malformed"].bit_count() == 1:  # 1, 2, 4, 8, ...: a flood must not fill a disk
                log.warning("malformed frame dropped", extra={"error": str(error), "count": self.counts["malformed"]})
            return None

    def _serve(self, message: ToExecutor) -> None:
        match message:
            case Ping() | Need():
                pass
            case Welcome():
                self._welcome(message)
            case FetchAsset():
                self.send(self.assets.chunk(message))
            case Prepare():
                self.send(Failed(message.grammar, "grammars are not supported by this executor"))
            case Forget():
                pass  # nothing was ever prepared
            case Drain():
                self.drained = True
            case Rehello():
                self._end_session("the core does not know this session")
            case Refused():
                self._end_session(f"refused: {message.reason}", at_least=message.retry_after)

    def _welcome(self, message: Welcome) -> None:
        if message.version not in PROTOCOL_VERSIONS:
            self._end_session(f"the core chose protocol version {message.version}", at_least=LAST_BACKOFF)
            return
        self.epoch = message.epoch
        self._backoff = FIRST_BACKOFF
        self._next_load = 0.0
        self._homing.welcomed(self._address)
        epoch = f"{message.epoch.incarnation:x}.{message.epoch.counter}"
        log.info("welcomed", extra={"epoch": epoch, "scheduler": self._address})
        self.on_epoch(message.epoch)
        if self._draining:
            self.send(Draining())

    # ----------------------------------------------------------------------------------------------------------------
    # Sessions

    def _keep_up(self, now: float) -> None:
        """Whatever time or the monitor asks for; called when nothing is queued."""
        session = self._session
        if session is None:
            if now >= self._next_connect:
                self._connect(now)
            return
        session.watch()
        if session.lost:
            # Frames that came before the loss count: a Refused may be among them.
            self._next_queued_before_loss(session)
            if session is self._session:
                self._end_session(session.lost)
        elif now - self._heard > SILENCE_LIMIT:
            self._end_session("the core is silent")
        else:
            self._report(now)

    def _report(self, now: float) -> None:
        if self.epoch is not None and now >= self._next_load:
            self._next_load = now + LOAD_INTERVAL
            self.send(self.load())

    def _next_queued_before_loss(self, session: Session) -> None:
        while session is self._session and not self.drained:
            parts = session.receive()
            if parts is None:
                return
            message = self._decode(parts)
            if isinstance(message, Refused | Drain):
                self._serve(message)

    def _connect(self, now: float) -> None:
        self.counts["sessions"] += 1
        self._heard = now
        try:
            self._address = self._homing.next_address()
            self._heard = time.monotonic()  # choosing may take a while
            self._session = Session(self._context, self._address, self.keys)
        except zmq.ZMQError as error:
            self._end_session(f"cannot connect: {error}")
            return
        self.send(self.hello)

    def _ask(self, addresses: list[str]) -> dict[str, Need]:
        return survey(self._context, addresses, AskNeed(self.hello.model.name), self.keys, self.wake)

    def _end_session(self, why: str, at_least: float = 0.0) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        was_welcome, self.epoch = self.epoch is not None, None
        if was_welcome:
            self._homing.lost()
        delay = max(at_least, self._backoff * (1.0 - 0.5 * random.random()))
        self._next_connect = time.monotonic() + delay
        level = logging.WARNING if was_welcome or self._backoff == FIRST_BACKOFF else logging.DEBUG
        log.log(level, "session ended", extra={"reason": why, "retry_in": round(delay, 2)})
        self._backoff = min(2 * self._backoff, LAST_BACKOFF)

    # ----------------------------------------------------------------------------------------------------------------
    # Waiting

    def _next_event(self, now: float) -> float:
        """When ``_keep_up`` has something to do next."""
        if self._session is None:
            return self._next_connect
        silent = self._heard + SILENCE_LIMIT + 0.001
        return min(silent, max(self._next_load, now)) if self.epoch is not None else silent

    def _wait(self, seconds: float) -> bool:
        """Sleep until a frame, a monitor event or ``seconds``; True when the wake descriptor ended it."""
        poller = zmq.Poller()
        if self._session is not None:
            poller.register(self._session.socket, zmq.POLLIN)
            poller.register(self._session.monitor, zmq.POLLIN)
        if self.wake is not None:
            poller.register(self.wake, zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(seconds * 1000 + 0.999))))
        return self.wake is not None and self.wake in ready
