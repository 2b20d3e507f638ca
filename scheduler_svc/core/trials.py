"""Which request crashes the core?

A request whose submission or admission ends the process would do so at every start, because API workers submit their
open streams again. After `AFTER` crashes in a row submissions are therefore let in a few at a time, each group on trial
until all of it made progress or ended; who is on trial is written down first (crash_ledger.py). A group at whose trial
the core crashed is tried again one by one, and a request that was alone on trial at two crashes ends INTERNAL.

Groups are as large as the square root of what waits: of n requests one that crashes the core costs three crashes more
and at most 2 * sqrt(n) trials.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable

from protos import front
from scheduler_svc.core.core import Core
from scheduler_svc.core.crash_ledger import LedgerFile
from scheduler_svc.core.sequence import State

log = logging.getLogger(__name__)

AFTER = 3  # crashes in a row
CONDEMNED_AT = 2  # crashes alone on trial
STABLE = 10.0  # seconds without a crash, with all tried that came within them: all is forgiven
PROGRESS = 8  # tokens of each choice, with which a trial is passed
PATIENCE = 10.0  # seconds, after which it is passed without them

_Key = tuple[bytes, int]  # (worker's peer, stream)


def name_of(submit: front.Submit) -> bytes:
    """The same for every submission of a request."""
    return hashlib.blake2b(f"{submit.tenant}\0{submit.request_id}".encode(), digest_size=8).digest()


class Trials:
    """Stands between the API workers and the core. ``answer`` sends to a worker."""

    def __init__(self, core: Core, file: LedgerFile, answer: Callable[[bytes, front.Failed], None], now: float) -> None:
        self._core = core
        self._file = file
        self._answer = answer
        self._began = now
        self._held: dict[_Key, tuple[front.Submit, float]] = {}  # in order, with the time at which it came
        self._on_trial: dict[_Key, tuple[front.Submit, float]] = {}  # with the time at which it began
        self._judge_the_last()

    def _judge_the_last(self) -> None:
        ledger = self._file.ledger
        if ledger.running:
            ledger.crashes += 1
            if len(ledger.trial) == 1:
                (name,) = ledger.trial
                ledger.alone[name] = ledger.alone.get(name, 0) + 1
                if ledger.alone[name] >= CONDEMNED_AT:
                    ledger.condemned.append(name)
            ledger.suspects += [name for name in ledger.trial if name not in ledger.suspects]
        ledger.trial = []
        ledger.running = True
        self._file.save()
        if self._cautious:
            facts = {"crashes": ledger.crashes, "suspects": len(ledger.suspects)}
            log.error("cores crashed in a row: requests are let in a few at a time", extra=facts)

    @property
    def _cautious(self) -> bool:
        return self._file.ledger.crashes >= AFTER

    def on_front(self, peer: bytes, message: front.ToCore, now: float) -> None:
        if self._cautious and peer in self._core.workers.by_peer:
            if isinstance(message, front.Submit):
                if name_of(message) in self._file.ledger.condemned:
                    self._condemn(peer, message)
                else:
                    self._held[peer, message.stream] = message, now
                return
            if isinstance(message, front.Cancel) and self._held.pop((peer, message.stream), None) is not None:
                self._answer(peer, front.Failed(message.stream, front.ABORTED, "cancelled"))
                return
        self._core.on_front(peer, message, now)

    def turn(self, now: float) -> None:
        """To be called at every turn of the loop."""
        if not self._file.ledger.crashes:
            return
        passed = [key for key, (submit, began) in self._on_trial.items() if self._passed(key, submit, now - began)]
        for key in passed:
            submit, _ = self._on_trial.pop(key)
            self._clear(name_of(submit))
        if self._on_trial:
            return
        self._held = {key: value for key, value in self._held.items() if key[0] in self._core.workers.by_peer}
        oldest = next((came for _, came in self._held.values()), now)
        if min(oldest, now) - self._began >= STABLE:
            self._forgive()
            for (peer, _), (submit, _) in self._held.items():
                self._core.on_front(peer, submit, now)
            self._held.clear()
        elif self._held:
            self._begin(now)

    def stopped(self) -> None:
        """The core ends as it was asked to."""
        self._forgive()
        self._file.ledger.running = False
        self._file.save()

    # -- trials ------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """The next one to be tried alone, or else the next group."""
        ledger = self._file.ledger
        alone = [key for key, (submit, _) in self._held.items() if name_of(submit) in ledger.suspects]
        group = alone[:1] or list(self._held)[: math.isqrt(len(self._held))]
        self._on_trial = {key: (self._held.pop(key)[0], now) for key in group}
        ledger.trial = [name_of(submit) for submit, _ in self._on_trial.values()]
        self._file.save()
        for (peer, _), (submit, _) in list(self._on_trial.items()):
            self._core.on_front(peer, submit, now)

    def _passed(self, key: _Key, submit: front.Submit, seconds: float) -> bool:
        peer, number = key
        worker = self._core.workers.by_peer.get(peer)
        stream = worker.streams.get(number) if worker is not None else None
        if stream is None:
            return key not in self._core.front_desk.early or seconds >= PATIENCE  # it ended, or its model is not here
        before = {choice.index: len(choice.outputs) // 4 for choice in submit.choices}
        return seconds >= PATIENCE or all(
            sequence.state is State.ENDED or sequence.num_outputs >= before.get(index, 0) + PROGRESS
            for index, sequence in stream.sequences.items()
        )

    def _clear(self, name: bytes) -> None:
        ledger = self._file.ledger
        ledger.trial = [other for other in ledger.trial if other != name]
        ledger.suspects = [other for other in ledger.suspects if other != name]
        ledger.alone.pop(name, None)
        self._file.save()

    def _condemn(self, peer: bytes, submit: front.Submit) -> None:
        log.error("a request crashed the core and ends", extra={"request": submit.request_id, "tenant": submit.tenant})
        message = f"the scheduler core died {CONDEMNED_AT} times when it ran this request alone"
        self._answer(peer, front.Failed(submit.stream, front.INTERNAL, message))

    def _forgive(self) -> None:
        ledger = self._file.ledger
        self._file.ledger = type(ledger)(running=ledger.running)
        self._file.save()
