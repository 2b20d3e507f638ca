"""What was sent and is not answered yet: one record a plan.

A record keeps the slots *and generations* of its rows, because by the time the result comes a slot may have a new
tenant. Nothing in it reads the slot table again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.step import StepPlan
from protos.wire import Int32

Rows = npt.NDArray[np.intp]  # slot numbers as numpy indexes with them: three times as fast as int32 ones


@dataclass(slots=True, eq=False)
class PlanRecord:
    seq: int
    digest: int
    slots: Rows  # [S] sampling rows, in the order of the result
    generations: Int32  # [S]
    slot_bytes: bytes  # as the result must state them
    generation_bytes: bytes
    prefill: list[tuple[int, int, int]]  # (slot, generation, count) of every prefill row
    tokens: int  # new tokens of all rows
    sent_at: float

    @property
    def num_sampling(self) -> int:
        return len(self.slots)


def make_record(
    plan: StepPlan, slots: Rows, generation: npt.NDArray[np.int32], prefill: list[tuple[int, int, int]], now: float
) -> PlanRecord:
    """The record of ``plan``, whose sampling rows are ``slots`` under the whole ``generation`` column."""
    generations = generation.take(slots)
    num_decode = len(plan.decode) // 4
    return PlanRecord(
        seq=plan.seq,
        digest=plan.digest,
        slots=slots,
        generations=generations,
        slot_bytes=plan.decode if len(slots) == num_decode else slots.astype("<i4").tobytes(),
        generation_bytes=generations.astype("<u2").tobytes(),
        prefill=prefill,
        tokens=num_decode + sum([count for _, _, count in prefill]),
        sent_at=now,
    )
