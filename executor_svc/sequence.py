"""What the executor holds of one sequence besides its rows in the slot arrays."""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.errors import RowError
from executor_svc.sampling.rules import RowRules
from protos.wire import Int32


@dataclass(slots=True, eq=False)
class Sequence:
    """One admission: a slot *and* its generation. Later tenants of the slot are other objects."""

    slot: int
    generation: int
    request_id: str
    prompt_len: int
    tokens: Int32  # prompt and outputs as admitted; what is sampled later lives on the device
    rules: RowRules | None
    fault: RowError | None  # its parameters cannot be honoured: it faults when it would sample
    prompt_logprobs: int = -1  # how many alternatives of each prompt token; -1: none are wanted (any more)
    prompt_scored: int = 1  # position of the first prompt token to score: the first of all follows nothing

    def record(self, token: int) -> None:
        """A sampled token reached the host: penalties of the next step count it."""
        if self.rules is not None and self.rules.counts is not None:
            self.rules.counts.add_output(token)
