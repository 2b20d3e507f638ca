"""One executor session as the core sees it: its card, its epoch, its slots, blocks and cache, its pipeline."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING

from protos.digest import epoch_digest
from protos.step import Hello, Load
from protos.wire import Epoch
from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.pipeline import PlanRecord
from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.slots import SlotTable
from scheduler_svc.core.step_age import StepAge

if TYPE_CHECKING:
    from scheduler_svc.core.models import ModelEntry


class ExecutorStatus(IntEnum):
    READY = 1  # welcomed
    DRAINING = 2  # it asked to leave: nothing new is admitted
    DRAINED = 3  # Drain was sent: no plan will follow
    GONE = 4  # the session is over; the object may still be referred to by nobody


class ExecutorState:
    """``epoch`` starts with an empty slate: a new table, pool and cache, seq 1 next (`start_epoch`)."""

    cache: PrefixCache

    def __init__(
        self, session: bytes, hello: Hello, model: ModelEntry, num_blocks: int, now: float, config: CoreConfig
    ) -> None:
        self.session = session
        self.name = hello.executor
        self.instance = hello.instance
        self.device = hello.device
        self.card = hello.model
        self.numerics = hello.model.numerics
        self.limits = hello.limits
        self.model = model
        self.num_blocks = num_blocks
        self.block_size = hello.limits.block_size
        self.max_sequence_tokens = min(hello.model.context_length, num_blocks * self.block_size)
        self.status = ExecutorStatus.READY
        self.token_budget = hello.limits.max_batch_tokens
        self.joined = now
        self.last_answer = now
        self.step_age = StepAge(config)
        self.steps = 0  # answered, over all epochs
        self.round_us = 0  # of the newest result
        self.pace = Pace(0.0)
        self.epochs = 0
        self.version = 1  # of the protocol, agreed at the Welcome
        self.load: Load | None = None  # newest, for operators
        self.isolated: Sequence | None = None  # a suspect that runs alone (suspects.py)
        self.rotor = 0  # first slot of the next decode batch when not all fit
        self.start_epoch(Epoch(0, 0))

    def start_epoch(self, epoch: Epoch) -> None:
        if self.epochs:
            self.cache.close()
            self.step_age.epoch_over()
        self.epoch = epoch
        self.epochs += 1
        self.seq = 0  # of the newest plan
        self.digest = epoch_digest(epoch)
        self.table = SlotTable(self.limits.max_slots)
        self.pool = BlockPool(self.num_blocks)
        self.cache = PrefixCache(self.pool, self.block_size)
        self.inflight: deque[PlanRecord] = deque()
        self.released: list[int] = []  # slots to release in the next plan
        self.prefilling: dict[int, Sequence] = {}  # by slot, in order of admission
        self.settling: dict[tuple[int, int], Sequence] = {}  # (slot, generation) of preempted rows unanswered
        self.filling: dict[bytes, Sequence] = {}  # hash -> who computes that block now, as the first not findable yet
        self.isolated = None

    def residents(self) -> list[Sequence]:
        """Every sequence in a slot, by slot."""
        return [s for s in self.table.sequences[: self.table.high] if s is not None]

    def sequence_at(self, slot: int, generation: int) -> Sequence | None:
        """The sequence that was given this slot under this generation, if it still goes on here."""
        sequence = self.table.sequences[slot] if slot < self.table.max_slots else None
        if sequence is not None and sequence.generation == generation:
            return sequence
        return self.settling.get((slot, generation))

    @property
    def inflight_rows(self) -> int:
        """Sampling rows not answered yet."""
        return sum(record.num_sampling for record in self.inflight)
