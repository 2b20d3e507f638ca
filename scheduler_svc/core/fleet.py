"""The executors and their models: who may join, who is expected back, who is kept away for a while."""

from __future__ import annotations

from dataclasses import dataclass

from protos import front, step
from protos.wire import Epoch
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.models import ModelEntry
from scheduler_svc.core.outbox import EXECUTOR, Destination, Outbox
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.pipeline import PlanRecord
from scheduler_svc.core.remains import Remains
from scheduler_svc.core.unanswered import Unanswered

# Two views of a batch that differ make a quarantine. A batch that raises is more likely the fault of a request, which
# takes four lost epochs to convict (suspects.py), so it counts less.
QUARANTINE_AT = 6
STRIKES_DIVERGED = 3
STRIKES_STEP_FAILED = 1


@dataclass(slots=True)
class Reputation:
    """What is remembered of an executor by its stable name, across its sessions."""

    good_steps: int = 0  # answered since its last lost epoch
    strikes: int = 0
    quarantined_until: float = 0.0


class Fleet:
    def __init__(self, config: CoreConfig, outbox: Outbox, unanswered: Unanswered) -> None:
        self.sessions: dict[bytes, ExecutorState] = {}
        self._processes: dict[tuple[str, int], ExecutorState] = {}  # by name and instance
        self.models: dict[str, ModelEntry] = {}
        # Whose turn it may be: those with room in their pipeline are looked at in every turn, who was planned for
        # longest ago first; but those which hold nothing (`idle` of their models) only while something waits there. All
        # others have as many plans unanswered as they may.
        self.open: dict[bytes, ExecutorState] = {}
        self.reputations: dict[str, Reputation] = {}
        self.remains = Remains()
        self._config = config
        self._outbox = outbox
        self._unanswered = unanswered

    # -- joining -----------------------------------------------------------------------------------------------------

    def refusal(self, hello: step.Hello, now: float) -> step.Refused | None:
        """Why this executor may not join now, or None."""
        card, limits = hello.model, hello.limits
        if not set(hello.versions) & set(step.PROTOCOL_VERSIONS):
            ours = ", ".join(map(str, step.PROTOCOL_VERSIONS))
            return step.Refused(f"protocol versions {list(hello.versions)}: this scheduler speaks {ours}", 60.0)
        until = self.reputations[hello.executor].quarantined_until if hello.executor in self.reputations else 0.0
        if until > now:
            return step.Refused("quarantined: too many epochs were lost in a row", min(until - now, 3600.0))
        if len(self.sessions) >= self._config.max_executors:
            return step.Refused(f"{self._config.max_executors} executors are here already", 30.0)
        if any(token >= card.vocab_size for token in card.eos_token_ids):
            return step.Refused("an EOS id lies outside the vocabulary", 60.0)
        entry = self.models.get(card.name)
        if entry is None:
            if len(self.models) >= self._config.max_models:
                return step.Refused(f"{self._config.max_models} models are known already", 60.0)
            return None
        in_use = bool(entry.executors) or entry.live_streams > 0
        if in_use and entry.fingerprint != card.fingerprint:
            return step.Refused(f"model {card.name!r} is live here with other weights ({entry.fingerprint[:12]})", 30.0)
        if in_use and entry.vocab_size != card.vocab_size:
            return step.Refused(f"model {card.name!r} is live here with {entry.vocab_size} token ids", 30.0)
        if in_use and entry.block_size != limits.block_size:
            return step.Refused(f"model {card.name!r} is live here with blocks of {entry.block_size} tokens", 30.0)
        return None

    def replaced_by(self, session: bytes, hello: step.Hello) -> list[ExecutorState]:
        """Who was this session, or an earlier one of the same process."""
        same = (self.sessions.get(session), self._processes.get((hello.executor, hello.instance)))
        return [executor for executor in dict.fromkeys(same) if executor is not None]

    def join(self, session: bytes, hello: step.Hello, now: float) -> ExecutorState:
        """A new session of an executor that `refusal` let in; the caller starts its epoch."""
        card = hello.model
        entry = self.models.get(card.name)
        if entry is None:
            entry = ModelEntry(card, hello.limits.block_size, self._config, now)
            self.models[card.name] = entry
        elif not entry.executors and not entry.live_streams:
            entry.describe(card, hello.limits.block_size)
        blocks = hello.limits.num_blocks
        if self._config.kv_blocks_limit:
            blocks = min(blocks, self._config.kv_blocks_limit)
        executor = ExecutorState(session, hello, entry, blocks, now, self._config)
        executor.pace = Pace(self._config.itl_target)
        entry.executors.append(executor)
        entry.by_session[session] = executor
        entry.expected.pop(hello.executor, None)
        entry.executors_changed()
        self.sessions[session] = executor
        self._processes[executor.name, executor.instance] = executor
        self.reputations.setdefault(hello.executor, Reputation())
        self._outbox.add_peer(Destination(EXECUTOR, session))
        return executor

    def leave(self, executor: ExecutorState, expected_back: bool, now: float) -> None:
        """The session is over; its sequences were taken from it before."""
        executor.status = ExecutorStatus.GONE
        self._close(executor)
        self._unanswered.given_up(executor)
        executor.cache.close()
        self.remains.add(executor.cache, executor.pool, executor.table)
        del self.sessions[executor.session]
        del self._processes[executor.name, executor.instance]
        self._outbox.drop_peer(Destination(EXECUTOR, executor.session))
        entry = executor.model
        entry.executors.remove(executor)
        del entry.by_session[executor.session]
        entry.empty_since = now
        if expected_back and all(other.name != executor.name for other in entry.executors):
            until = now + self._config.expect_executor_for
            entry.expected[executor.name] = (until, executor.max_sequence_tokens)
        entry.executors_changed()

    # -- whose turn it is --------------------------------------------------------------------------------------------

    def start_epoch(self, executor: ExecutorState, epoch: Epoch) -> None:
        """Its sequences were taken from it before."""
        self._unanswered.given_up(executor)
        cache, pool, table = executor.cache, executor.pool, executor.table
        executor.start_epoch(epoch)
        self.remains.add(cache, pool, table)
        self._open(executor)

    def drains(self, executor: ExecutorState) -> None:
        executor.status = ExecutorStatus.DRAINING
        self._open(executor)

    def planned(self, executor: ExecutorState, record: PlanRecord) -> None:
        self._unanswered.planned(executor, record)
        if len(executor.inflight) < self._config.depth or executor.status is ExecutorStatus.DRAINING:
            self._open(executor)
        else:
            self._close(executor)

    def answered(self, executor: ExecutorState, record: PlanRecord) -> None:
        self._unanswered.answered(executor, record)
        self._open(executor)
        self.reputations[executor.name].good_steps += 1

    def found_nothing(self, executor: ExecutorState) -> None:
        """There is no plan for it now."""
        if executor.status is ExecutorStatus.READY:
            holds = executor.table.used or executor.released or executor.inflight or executor.settling
            if not holds and executor.isolated is None:
                self._close(executor)
                executor.model.idle[executor.session] = executor
        elif executor.status is not ExecutorStatus.DRAINING:
            self._close(executor)

    def _open(self, executor: ExecutorState) -> None:
        self._close(executor)
        self.open[executor.session] = executor

    def _close(self, executor: ExecutorState) -> None:
        self.open.pop(executor.session, None)
        model = executor.model
        if model.idle:
            model.idle.pop(executor.session, None)
            model.wanted.pop(executor.session, None)  # one of the idle

    # -- reputation --------------------------------------------------------------------------------------------------

    def epoch_lost(self, executor: ExecutorState, strikes: int, now: float) -> float:
        """Count a lost epoch, as ``strikes`` of `QUARANTINE_AT`. Returns for how long the executor is now quarantined
        (0: it is not). Enough good steps since the last one wipe the slate."""
        reputation = self.reputations[executor.name]
        if reputation.good_steps >= self._config.good_steps:
            reputation.strikes = 0
        reputation.good_steps = 0
        reputation.strikes += strikes
        if reputation.strikes < QUARANTINE_AT:
            return 0.0
        reputation.strikes = 0
        reputation.quarantined_until = now + self._config.quarantine
        return self._config.quarantine

    # -- time --------------------------------------------------------------------------------------------------------

    def forget_old(self, now: float) -> bool:
        """Drop expectations and models that are over. Returns whether anything changed."""
        changed = False
        for entry in list(self.models.values()):
            for name, (until, _) in list(entry.expected.items()):
                if until <= now:
                    del entry.expected[name]
                    entry.executors_changed()
                    changed = True
            idle = not entry.executors and not entry.live_streams and not entry.expected
            if idle and now - entry.empty_since >= self._config.forget_model_after:
                del self.models[entry.name]
                changed = True
        present = {executor.name for executor in self.sessions.values()}
        for name, reputation in list(self.reputations.items()):
            if name not in present and reputation.quarantined_until <= now and len(self.reputations) > 4096:
                del self.reputations[name]
        return changed

    def describe(self) -> front.Models:
        """What the API workers are told."""
        return front.Models(tuple(_model_state(entry) for entry in self.models.values()))


def _model_state(entry: ModelEntry) -> front.ModelState:
    return front.ModelState(
        name=entry.name,
        architecture=entry.card.architecture,
        fingerprint=entry.fingerprint,
        vocab_size=entry.vocab_size,
        context_length=entry.context_length,
        block_size=entry.block_size,
        eos_token_ids=entry.card.eos_token_ids,
        assets=entry.card.assets,
        executors_ready=len(entry.ready),
        executors_expected=len(entry.expected),
        max_sequence_tokens=entry.max_sequence_tokens,
        total_blocks=sum(e.pool.total for e in entry.executors),
        free_blocks=sum(e.pool.available for e in entry.executors),
        running=sum(e.table.used for e in entry.executors),
        waiting=len(entry.queue),
    )
