"""A model by name: what its executors say about it, and who waits for them."""

from __future__ import annotations

import numpy as np

from protos.step import ModelCard
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.fairness import FairShares
from scheduler_svc.core.passing import AdmissionLog
from scheduler_svc.core.queue import WaitingQueue


class ModelEntry:
    def __init__(self, card: ModelCard, block_size: int, config: CoreConfig, now: float) -> None:
        self.name = card.name
        self.queue = WaitingQueue(config.ageing, FairShares(config.fair_window, config.fair_tokens))
        self.admissions = AdmissionLog()
        self.executors: list[ExecutorState] = []
        self.expected: dict[str, tuple[float, int]] = {}  # vanished executors: name -> (until, max_sequence_tokens)
        self.live_streams = 0
        self.empty_since = now  # meaningful while `executors` is empty
        self.describe(card, block_size)

    def describe(self, card: ModelCard, block_size: int) -> None:
        """Take this card as the model's (no executor of another one is here)."""
        self.card = card
        self.block_size = block_size
        self.vocab_size = card.vocab_size
        self.fingerprint = card.fingerprint
        self.is_eos = np.zeros(card.vocab_size, dtype=bool)
        ids = [token for token in card.eos_token_ids if token < card.vocab_size]
        self.is_eos[ids] = True
        self.executors_changed()

    def executors_changed(self) -> None:
        """To be called after every change of `executors` and `expected`: each request asks for these."""
        known = [e.max_sequence_tokens for e in self.executors] + [tokens for _, tokens in self.expected.values()]
        self.max_sequence_tokens = max(known, default=0)  # the most that any known executor can hold
        self.context_length = max((e.card.context_length for e in self.executors), default=self.card.context_length)

    @property
    def ready(self) -> list[ExecutorState]:
        return [e for e in self.executors if e.status is ExecutorStatus.READY]
