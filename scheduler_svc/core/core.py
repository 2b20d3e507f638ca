"""The scheduler core: a state machine from (message, time) to messages. No socket, no clock, no thread in it.

::

    on_front / on_executor / on_*_gone     apply one event
    on_tick                                what time alone brings: deadlines, hung executors, pings
    advance                                make the plans that pipelines have room for
    take_outbox                            what is to be sent, in order

The shell (loop.py) applies all events that wait, then calls `advance` once, so that requests which come together are
planned together. Times are Unix seconds, given by the caller, and never run backwards.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter

from protos import front, step
from scheduler_svc.core.assets import Assets
from scheduler_svc.core.commit import Committer
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.front_desk import FrontDesk
from scheduler_svc.core.models import ModelEntry
from scheduler_svc.core.outbox import EXECUTOR, Destination, Message, Outbox
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.queue import Entry
from scheduler_svc.core.residency import Residency
from scheduler_svc.core.routing import Routing
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.sessions import Sessions
from scheduler_svc.core.streams import Streams
from scheduler_svc.core.suspects import Suspects
from scheduler_svc.core.tenant_limits import NO_LIMITS, LimitsFile
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.unanswered import Unanswered
from scheduler_svc.core.workers import Workers

log = logging.getLogger(__name__)

_SURVEY_INTERVAL = 1.0  # seconds between looks for requests that nobody can take
_SURVEYED_A_TICK = 512  # of them
_WORK_A_TURN = 16  # plans and admissions; after these the others' plans are made in the next turn, which comes at once


class Core:
    def __init__(
        self, config: CoreConfig, now: float, incarnation: int | None = None, limits: LimitsFile = NO_LIMITS
    ) -> None:
        self.config = config
        self.started = now
        self.incarnation = secrets.randbits(64) if incarnation is None else incarnation
        self.epoch_counter = 0
        self.submitted = 0  # sequences
        self.counters: Counter[str] = Counter()
        self.fleet_changed = False

        self.outbox = Outbox()
        unanswered = Unanswered()
        self.residency = Residency(config, unanswered)
        self.routing = Routing(config, self.residency)
        self.suspects = Suspects(config)
        self.workers = Workers(self.outbox, config.max_workers, unanswered)
        self.tenants = Tenants(limits)
        self.streams = Streams(self.outbox, self.residency, self.tenants)
        self.fleet = Fleet(config, self.outbox, unanswered)
        self.assets = Assets(config, self.outbox)
        self.planner = Planner(config, self.workers, self.residency, self.routing, self.suspects)
        self.committer = Committer(self.residency, self.streams, self.workers, self.outbox)
        self.front_desk = FrontDesk(self)
        self.sessions = Sessions(self)
        self._last_tick = now
        self._last_survey = now
        self._work_left = _WORK_A_TURN
        self._unfinished: float | None = None  # when a turn left plans to the next one
        self._idle_first = False  # the last one did not come to them
        self._first_model = 0  # whose idle executors come first
        self._to_survey: list[list[Entry]] = []  # waiting sequences of this look that are still to be looked at

    # -- events ------------------------------------------------------------------------------------------------------

    def on_front(self, worker_id: bytes, message: front.ToCore, now: float) -> None:
        self.outbox.at(now)
        self.front_desk.handle(worker_id, message, now)

    def on_executor(self, session: bytes, message: step.ToCore, now: float) -> None:
        self.outbox.at(now)
        self.sessions.handle(session, message, now)

    def on_session_gone(self, session: bytes, now: float) -> None:
        """The transport lost this executor. What ran there continues elsewhere, or waits for it."""
        self.outbox.at(now)
        executor = self.fleet.sessions.get(session)
        if executor is not None:
            log.warning("executor gone", extra={"executor": executor.name, "unanswered": len(executor.inflight)})
            drained = executor.status is ExecutorStatus.DRAINED
            self.sessions.end(executor, now, expected_back=not drained, death=True)

    def on_worker_gone(self, worker_id: bytes, now: float) -> None:
        self.outbox.at(now)
        worker = self.workers.by_peer.get(worker_id)
        if worker is not None:
            log.warning("API worker gone", extra={"worker": worker.name, "streams": len(worker.streams)})
            self.front_desk.worker_gone(worker)

    def on_disconnect(self, kind: str, now: float) -> None:
        """A connection of this kind of peer (outbox.py) ended, the transport does not say whose: a ping to each finds
        out now what the next regular one would."""
        self.outbox.at(now)
        self.counters["disconnects"] += 1
        self._ping([destination for destination in self.outbox.last_sent if destination.kind == kind])

    def on_stall(self, now: float) -> None:
        """This process itself stood still: answers may be on their way that it had no time to read."""
        self.counters["stalls"] += 1
        for executor in self.fleet.sessions.values():
            executor.last_answer = now

    def on_malformed(self) -> None:
        """A frame that is no message of the contract was dropped by the shell."""
        self.counters["malformed"] += 1

    def on_limits(self, limits: LimitsFile) -> None:
        """The tenants' limits from now on."""
        self.tenants.replace_limits(limits)

    # -- time --------------------------------------------------------------------------------------------------------

    def on_tick(self, now: float) -> None:
        self.outbox.at(now)
        self.streams.expire(now)
        self.front_desk.expire_early(now)
        if now - self._last_tick < self.config.ping_interval:
            return
        self._last_tick = now
        for executor in list(self.fleet.sessions.values()):
            age, allowed = self._step_age(executor, now)
            if age > allowed:
                self.sessions.hung(executor, age, now)
        if now - self._last_survey >= _SURVEY_INTERVAL and not self._to_survey:
            self._last_survey = now
            self._to_survey = [line for entry in self.fleet.models.values() for line in entry.queue.lines()]
            self.tenants.forget_idle(now)
            if self.fleet.forget_old(now):
                self.fleet_changed = True
        self._survey(now)
        self._ping(self.outbox.silent_since(now - self.config.ping_interval))

    def _ping(self, destinations: list[Destination]) -> None:
        for destination in destinations:
            if destination.kind == EXECUTOR:
                self.outbox.to_executor(destination.peer, step.Ping())
            else:
                self.outbox.to_worker(destination.peer, front.Ping(self.incarnation))

    def next_deadline(self) -> float | None:
        """When `on_tick` or `advance` has something to do, if no event comes before."""
        if self._unfinished is not None:
            return self._unfinished
        soonest = None
        if self.outbox.last_sent or self.fleet.models:
            soonest = self._last_tick + self.config.ping_interval
        for time in (self.streams.next_deadline(), self.front_desk.next_early()):
            if time is not None and (soonest is None or time < soonest):
                soonest = time
        return soonest

    # -- output ------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Fill every pipeline that has room, one plan an executor at a time, until it was enough for a turn: then
        `next_deadline` asks for another one at once, so that what was planned is not held back."""
        self.outbox.at(now)
        self._unfinished = None
        self._work_left = _WORK_A_TURN
        fleet = list(self.fleet.sessions.values())
        if self._idle_first:
            self._plan_idle(fleet, now)
            self._plan_open(fleet, now)
        else:
            self._plan_open(fleet, now)
            self._plan_idle(fleet, now)
        self._idle_first = self.has_more_to_plan and not self._idle_first
        if self.fleet_changed:
            self.fleet_changed = False
            models = self.fleet.describe()
            for peer in self.workers.by_peer:
                self.outbox.to_worker(peer, models)
        if self.fleet.remains:
            self.fleet.remains.take_apart()

    @property
    def has_more_to_plan(self) -> bool:
        """The last turn was long enough: `advance` should be called again, at once."""
        return self._unfinished is not None

    def take_outbox(self) -> list[tuple[Destination, Message]]:
        return self.outbox.take()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _plan_open(self, fleet: list[ExecutorState], now: float) -> None:
        following = list(self.fleet.open.values())
        while following:
            following = [executor for executor in following if self._plan_one(executor, fleet, now)]

    def _plan_idle(self, fleet: list[ExecutorState], now: float) -> None:
        models, could = list(self.fleet.models.values()), self._work_left > 0
        if not any(entry.idle for entry in models):
            return
        for entry in models[self._first_model :] + models[: self._first_model]:
            if entry.idle and len(entry.queue):
                self._wake_idle(entry, fleet, now)
        if could and self._work_left <= 0:  # perhaps not all had their turn
            self._first_model = (self._first_model + 1) % len(models)

    def _plan_one(self, executor: ExecutorState, fleet: list[ExecutorState], now: float) -> bool:
        if executor.status is ExecutorStatus.DRAINING:
            self.sessions.drain(executor, now)
        if len(executor.inflight) >= self.config.depth:
            return False
        if self._work_left <= 0:
            self._unfinished = now
            return False
        able = executor.status is ExecutorStatus.READY or executor.status is ExecutorStatus.DRAINING
        plan = self.planner.plan(executor, fleet, now) if able else None
        if plan is None:
            self.fleet.found_nothing(executor)
            return False
        self._work_left -= 1 + len(plan.admitted)
        self.fleet.planned(executor, executor.inflight[-1])
        self.outbox.to_executor(executor.session, plan)
        return True

    def _wake_idle(self, entry: ModelEntry, fleet: list[ExecutorState], now: float) -> None:
        """Executors that hold nothing take what waits. Where one finds nothing that it may take, its equals are not
        asked, but those for which something was left."""
        fruitless: set[tuple[int, str]] = set()
        planned: list[ExecutorState] = []
        for executor in [*entry.wanted.values(), *entry.idle.values()]:
            if not len(entry.queue):
                break
            if self._work_left <= 0:
                self._unfinished = now
                return
            kind = (executor.max_sequence_tokens, executor.numerics)
            wanted = entry.wanted.pop(executor.session, None)
            if executor.session not in entry.idle or (kind in fruitless and wanted is None):
                continue
            if self._plan_one(executor, fleet, now):
                planned.append(executor)
            else:
                fruitless.add(kind)
        while planned:
            planned = [executor for executor in planned if self._plan_one(executor, fleet, now)]

    def _step_age(self, executor: ExecutorState, now: float) -> tuple[float, float]:
        """(age of the oldest unanswered step since the one before it was answered, the age it may reach)."""
        if not executor.inflight:
            return 0.0, 1.0
        oldest = executor.inflight[0]
        return now - max(oldest.sent_at, executor.last_answer), executor.step_age.allowed(oldest)

    def _survey(self, now: float) -> None:
        """End requests that no executor could take for too long. Looks at some of those that wait, the next ones at the
        next tick."""
        for _ in range(_SURVEYED_A_TICK):
            while self._to_survey and not self._to_survey[-1]:
                self._to_survey.pop()
            if not self._to_survey:
                return
            _, sequence = self._to_survey[-1].pop()
            if sequence.state is State.WAITING:
                self._end_if_unroutable(sequence, now)

    def _end_if_unroutable(self, sequence: Sequence, now: float) -> None:
        entry = sequence.stream.model
        if any(self.routing.may_admit(executor, sequence) for executor in entry.executors):
            sequence.unroutable_since = 0.0
            return
        if sequence.unroutable_since == 0.0:
            left = now if entry.executors else entry.empty_since
            sequence.unroutable_since = max(sequence.enqueued, left)
        if now - sequence.unroutable_since < self.config.wait_for_executor:
            return
        if not sequence.stream.live:
            return  # a choice before it ended the stream
        waited = f"no executor of {entry.name!r} that can run this request came within "
        waited += f"{self.config.wait_for_executor:g} s"
        self.streams.fail(sequence.stream, front.UNAVAILABLE, waited, retry_after=1.0)
