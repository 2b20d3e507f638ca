"""What executors say, and what becomes of their sequences when a session or an epoch ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from protos import front, step
from protos.wire import Epoch
from scheduler_svc.core.commit import Divergence
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.fleet import STRIKES_DIVERGED, STRIKES_STEP_FAILED
from scheduler_svc.core.sequence import Sequence

if TYPE_CHECKING:
    from scheduler_svc.core.core import Core

log = logging.getLogger(__name__)

_LOST_NAMES = {
    step.DIGEST_MISMATCH: "digest mismatch",
    step.BAD_SEQUENCE: "bad sequence",
    step.BAD_PLAN: "bad plan",
    step.OUT_OF_MEMORY: "out of memory",
    step.STEP_FAILED: "step failed",
}
_SMALLEST_BUDGET = 16  # tokens a step; an executor that cannot even run these is at fault itself


class Sessions:
    def __init__(self, core: Core) -> None:
        self._core = core

    def handle(self, session: bytes, message: step.ToCore, now: float) -> None:
        core = self._core
        if isinstance(message, step.Hello):
            self._hello(session, message, now)
            return
        if isinstance(message, step.AskNeed):
            entry = core.fleet.models.get(message.model)
            need = step.Need(len(entry.executors), entry.live_streams) if entry is not None else step.Need(0, 0)
            core.outbox.to_executor(session, need)
            return
        executor = core.fleet.sessions.get(session)
        if executor is None:
            if not isinstance(message, step.Goodbye):
                core.counters["strangers"] += 1
                core.outbox.to_executor(session, step.Rehello())
            return
        match message:
            case step.StepResult():
                self._result(executor, message, now)
            case step.EpochLost():
                if message.epoch == executor.epoch:
                    self.lose_epoch(executor, message.code, message.detail, message.seq, now)
                else:
                    core.counters["stale_results"] += 1
            case step.AssetChunk():
                if not core.assets.on_chunk(session, message):
                    core.counters["unexpected"] += 1
            case step.Load():
                executor.load = message
            case step.Draining():
                if executor.status is ExecutorStatus.READY:
                    log.info("executor drains", extra={"executor": executor.name})
                    core.fleet.drains(executor)
                    core.fleet_changed = True
            case step.Goodbye():
                log.info("executor left", extra={"executor": executor.name, "reason": message.reason})
                self.end(executor, now, expected_back=False, death=False)
            case _:  # Prepared, Failed: nothing was asked to be prepared
                core.counters["unexpected"] += 1

    # -- joining -----------------------------------------------------------------------------------------------------

    def _hello(self, session: bytes, hello: step.Hello, now: float) -> None:
        core = self._core
        for old in core.fleet.replaced_by(session, hello):
            self.end(old, now, expected_back=True, death=False)
        refused = core.fleet.refusal(hello, now)
        if refused is not None:
            log.warning("executor refused", extra={"executor": hello.executor, "reason": refused.reason})
            core.counters["refused"] += 1
            core.outbox.to_executor(session, refused)
            return
        executor = core.fleet.join(session, hello, now)
        version = max(set(hello.versions) & set(step.PROTOCOL_VERSIONS))
        log.info(
            "executor joined",
            extra={
                "executor": executor.name,
                "model": executor.model.name,
                "blocks": executor.num_blocks,
                "slots": executor.limits.max_slots,
                "protocol": version,
            },
        )
        self._welcome(executor, version)
        core.assets.announce(executor)
        core.fleet_changed = True
        core.front_desk.model_came(executor.model.name, now)

    def _welcome(self, executor: ExecutorState, version: int) -> None:
        core = self._core
        core.epoch_counter += 1
        executor.version = version
        core.fleet.start_epoch(executor, Epoch(core.incarnation, core.epoch_counter))
        core.outbox.to_executor(executor.session, step.Welcome(executor.epoch, version, core.config.depth))

    # -- steps -------------------------------------------------------------------------------------------------------

    def _result(self, executor: ExecutorState, result: step.StepResult, now: float) -> None:
        core = self._core
        if result.epoch != executor.epoch:
            core.counters["stale_results"] += 1
            return
        record = executor.inflight[0] if executor.inflight else None
        try:
            core.committer.commit(executor, result, now)
        except Divergence as error:
            self.lose_epoch(executor, step.BAD_SEQUENCE, str(error), result.seq, now)
            return
        assert record is not None  # else it diverged
        core.fleet.answered(executor, record)
        prompt_tokens = sum([count for _, _, count in record.prefill]) if record.prefill else 0
        executor.pace.observe(record.tokens - prompt_tokens, prompt_tokens, result.round_us)

    def lose_epoch(self, executor: ExecutorState, code: int, detail: str, seq: int, now: float) -> None:
        """The two views of the batch differ, or the batch failed: an empty slate, and all its sequences continue."""
        core = self._core
        core.counters["epochs_lost"] += 1
        name = _LOST_NAMES.get(code, f"code {code}")
        log.warning("epoch lost", extra={"executor": executor.name, "plan": seq, "code": name, "detail": detail})
        strikes = STRIKES_DIVERGED
        condemned: dict[Sequence, None] = {}
        if code == step.OUT_OF_MEMORY and executor.token_budget > _SMALLEST_BUDGET:
            # The shape of the batch, nobody's fault: smaller ones from now on.
            ran = max((record.tokens for record in executor.inflight if record.seq == seq), default=0)
            halved = (ran or executor.token_budget) // 2
            executor.token_budget = max(_SMALLEST_BUDGET, min(halved, executor.token_budget - 1))
            strikes = 0
        elif code == step.STEP_FAILED:
            condemned = core.suspects.on_death(executor)
            strikes = STRIKES_STEP_FAILED
        self._scatter(executor, condemned, f"the executor failed twice on this request alone ({detail})", now)
        quarantine = core.fleet.epoch_lost(executor, strikes, now) if strikes else 0.0
        if quarantine:
            log.error("executor quarantined", extra={"executor": executor.name, "seconds": quarantine})
            core.outbox.to_executor(executor.session, step.Refused(f"quarantined: {name}: {detail}"[:4096], quarantine))
            self._leave(executor, now, expected_back=True)
            return
        self._welcome(executor, executor.version)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def end(self, executor: ExecutorState, now: float, *, expected_back: bool, death: bool) -> None:
        """The session is over; its sequences continue elsewhere, or wait. ``death``: nobody said goodbye, so what ran
        there becomes suspect."""
        condemned = self._core.suspects.on_death(executor) if death else {}
        self._scatter(executor, condemned, "the executor died twice while it ran this request alone", now)
        self._leave(executor, now, expected_back)

    def hung(self, executor: ExecutorState, age: float, now: float) -> None:
        log.error("executor hangs", extra={"executor": executor.name, "step_age": round(age, 1)})
        self._core.counters["hung"] += 1
        self._core.outbox.to_executor(executor.session, step.Rehello())
        self.end(executor, now, expected_back=True, death=True)

    def drain(self, executor: ExecutorState, now: float) -> None:
        """Move what can continue elsewhere; say Drain when nothing is left."""
        core = self._core
        others = [e for e in executor.model.ready if e.numerics == executor.numerics]
        for sequence in executor.residents():
            if any(core.routing.can_ever_take(other, sequence) for other in others):
                core.residency.preempt(executor, sequence, now)
        busy = executor.table.used or executor.settling or executor.inflight
        if not busy and not any(core.routing.may_admit(executor, sequence) for sequence in executor.model.queue):
            executor.status = ExecutorStatus.DRAINED
            core.outbox.to_executor(executor.session, step.Drain())

    def _scatter(self, executor: ExecutorState, condemned: dict[Sequence, None], why: str, now: float) -> None:
        core = self._core
        failed = {sequence.stream: None for sequence in condemned}  # in order: a replay must fail them alike
        for sequence in core.residency.abandon(executor):
            if sequence.stream not in failed:
                core.residency.requeue(sequence, now)
        for stream in failed:
            core.streams.fail(stream, front.INTERNAL, why)

    def _leave(self, executor: ExecutorState, now: float, expected_back: bool) -> None:
        core = self._core
        core.fleet.leave(executor, expected_back, now)
        core.assets.session_gone(executor.session)
        core.fleet_changed = True
