"""Sampling parameters: of every slot (a struct of arrays), and of the rows that sample in one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor_svc.sampling.rules import GREEDY_BELOW
from executor_svc.sequence import Sequence
from protos.step import Admission
from protos.wire import Int32


@dataclass(slots=True, frozen=True)
class DrawParams:
    """Of the rows of one step that draw, n of N."""

    rows: npt.NDArray[np.int64]  # [n] indices into the step's sampling rows
    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    choice: npt.NDArray[np.uint64]


@dataclass(slots=True, frozen=True)
class SampleRows:
    """The N rows of a step that sample. Row i samples from logits row i.

    It holds the sequences themselves: nothing here is looked up by slot again after a later plan was applied.
    """

    slots: Int32  # [N]
    generations: Int32  # [N]
    positions: npt.NDArray[np.int64]  # [N] index into the sequence (prompt and outputs) of the token to draw
    outputs: npt.NDArray[np.int64]  # [N] its output position: outputs before it
    draws: DrawParams | None  # None: every row takes its argmax
    special: tuple[tuple[int, Sequence], ...]  # (row, sequence) of rows with rules or a fault


class SlotParams:
    """Per-slot drawing parameters, written at admission; a step takes its rows from them in a few vector operations."""

    def __init__(self, max_slots: int) -> None:
        self.plain = np.ones(max_slots, dtype=bool)  # argmax of the raw logits, nothing else
        self.draws = np.zeros(max_slots, dtype=bool)
        self.special = np.zeros(max_slots, dtype=bool)
        self.scores = np.zeros(max_slots, dtype=bool)  # prompt logprobs
        self.temperature = np.zeros(max_slots, dtype=np.float64)
        self.top_k = np.zeros(max_slots, dtype=np.int64)
        self.top_p = np.ones(max_slots, dtype=np.float64)
        self.min_p = np.zeros(max_slots, dtype=np.float64)
        self.seed = np.zeros(max_slots, dtype=np.uint64)
        self.choice = np.zeros(max_slots, dtype=np.uint64)

    def admit(self, admission: Admission, sequence: Sequence) -> None:
        slot, params = admission.slot, admission.sampling
        self.special[slot] = sequence.fault is not None or sequence.rules is not None
        self.draws[slot] = sequence.fault is None and params.temperature >= GREEDY_BELOW
        self.scores[slot] = sequence.prompt_logprobs >= 0
        self.plain[slot] = not (self.special[slot] or self.draws[slot])
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed
        self.choice[slot] = admission.choice

    def draws_of(self, slots: Int32) -> DrawParams | None:
        rows = np.flatnonzero(self.draws.take(slots))
        if not len(rows):
            return None
        chosen = slots[rows]
        return DrawParams(
            rows=rows,
            temperature=self.temperature.take(chosen),
            top_k=self.top_k.take(chosen),
            top_p=self.top_p.take(chosen),
            min_p=self.min_p.take(chosen),
            seed=self.seed.take(chosen),
            choice=self.choice.take(chosen),
        )
