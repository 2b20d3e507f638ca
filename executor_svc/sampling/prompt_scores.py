"""Log probabilities of prompt tokens: what a forward over prompt positions leaves for its request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor_svc.pieces import ScoredPart
from executor_svc.sampling.logprobs import row_logprobs
from executor_svc.sampling.rows import SampleRows
from executor_svc.sampling.sampler import FAULT_TOKEN, SamplerOutput
from executor_svc.sequence import Sequence
from protos.step import NON_FINITE, RowFault, RowLogprobs, SlotLogprobs


class PromptScores:
    """Collects the scored positions of one step, whose pieces come in order."""

    def __init__(self) -> None:
        self._rows: dict[Sequence, list[RowLogprobs]] = {}
        self._faults: dict[Sequence, RowFault] = {}

    def add(self, logits: npt.NDArray[np.float32], part: ScoredPart) -> None:
        """``logits`` [count, V], C order: row i scores token ``part.first + i``."""
        sequence = part.scored.sequence
        if sequence in self._faults:
            return
        tops = logits.max(axis=1)  # numpy: NaN if there is one
        if not np.isfinite(tops).all():
            at = int(np.argmin(np.isfinite(tops)))
            self.fault(sequence, f"logits at prompt position {part.first - 1 + at} are not finite ({tops[at]})")
            return
        tokens = sequence.tokens[part.first : part.first + part.count].tolist()
        first, top = part.first, sequence.prompt_logprobs
        self.extend(sequence, [row_logprobs(logits[i], token, top, first + i) for i, token in enumerate(tokens)])

    def extend(self, sequence: Sequence, rows: list[RowLogprobs]) -> None:
        """The next positions of a sequence; nothing where it is at fault."""
        if sequence not in self._faults:
            self._rows.setdefault(sequence, []).extend(rows)

    def fault(self, sequence: Sequence, detail: str) -> None:
        """The sequence's prompt has no finite logits somewhere."""
        self._rows.pop(sequence, None)
        self._faults[sequence] = RowFault(sequence.slot, sequence.generation, NON_FINITE, detail)

    @property
    def logprobs(self) -> tuple[SlotLogprobs, ...]:
        return tuple(SlotLogprobs(s.slot, s.generation, tuple(rows)) for s, rows in self._rows.items())

    @property
    def faults(self) -> tuple[RowFault, ...]:
        """Rows whose prompt has no finite logits somewhere; they have no logprobs."""
        return tuple(self._faults.values())


def with_prompt(output: SamplerOutput, prompt: PromptScores, rows: SampleRows) -> SamplerOutput:
    """The same with the logprobs of prompt tokens first; a row whose prompt is at fault has no token."""
    faults = prompt.faults
    at_fault = {fault.slot for fault in faults}
    if not at_fault:
        return SamplerOutput(output.tokens, output.ok, output.faults, prompt.logprobs + output.logprobs)
    ok = output.ok & ~np.isin(rows.slots, list(at_fault))
    logprobs = prompt.logprobs + tuple(entry for entry in output.logprobs if entry.slot not in at_fault)
    faults += tuple(fault for fault in output.faults if fault.slot not in at_fault)
    return SamplerOutput(np.where(ok, output.tokens, FAULT_TOKEN), ok, faults, logprobs)
