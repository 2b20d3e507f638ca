"""A model by name: what its executors say about it, and who waits for them."""

from __future__ import annotations

import math

import numpy as np

from protos.step import ModelCard
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor import ExecutorState, ExecutorStatus
from scheduler_svc.core.fairness import FairShares
from scheduler_svc.core.passing import AdmissionLog
from scheduler_svc.core.prefix_homes import PrefixHomes
from scheduler_svc.core.queue import WaitingQueue

ASKED = 17  # executors of a model, of which each is asked where a request is placed best; of more, some (routing.py)


class ModelEntry:
    def __init__(self, card: ModelCard, block_size: int, config: CoreConfig, now: float) -> None:
        self.name = card.name
        self.queue = WaitingQueue(config.ageing, FairShares(config.fair_window, config.fair_tokens))
        self.admissions = AdmissionLog()
        self.executors: list[ExecutorState] = []
        self.by_session: dict[bytes, ExecutorState] = {}
        self.idle: dict[bytes, ExecutorState] = {}  # they hold nothing (fleet.py)
        self.wanted: dict[bytes, ExecutorState] = {}  # of the idle ones: something was left for them
        self.homes = PrefixHomes()
        self.loads_from = 0  # where the next look at loads starts (routing.py)
        self.least_loaded: list[ExecutorState] = []  # as of `loads_at` (routing.py)
        self.loads_at = -math.inf
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
        """To be called after every change of `executors` and `expected`: each request asks for what follows from
        them, and many may come at once."""
        self.least_loaded, self.loads_at, self.loads_from = [], -math.inf, 0
        self._max_sequence_tokens = self._context_length = -1  # not known now

    @property
    def max_sequence_tokens(self) -> int:
        """The most that any known executor can hold."""
        if self._max_sequence_tokens < 0:
            known = [e.max_sequence_tokens for e in self.executors] + [tokens for _, tokens in self.expected.values()]
            self._max_sequence_tokens = max(known, default=0)
        return self._max_sequence_tokens

    @property
    def context_length(self) -> int:
        if self._context_length < 0:
            here = [executor.card.context_length for executor in self.executors]
            self._context_length = max(here, default=self.card.context_length)
        return self._context_length

    @property
    def is_large(self) -> bool:
        return len(self.executors) > ASKED

    @property
    def ready(self) -> list[ExecutorState]:
        return [e for e in self.executors if e.status is ExecutorStatus.READY]
