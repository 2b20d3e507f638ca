"""The flat description of one step's batch, made once a step by ``prepare_inputs`` and read by everything after it.

Nothing here is padded: T is the number of new tokens over all rows, R the number of rows, S the number of rows of
the logits that the step needs (one for each row whose last new token is sampled, more where drafts are verified; in the
pieces of a step with prompt logprobs, one for each position that is scored).

::

    rows            0 (prefill, 4 new)     1 (decode)      2 (prefill, 2 new)
    input_ids       101 872 2304 1198      345             7 9
    positions       0   1   2    3         42              16 17
    seq_lens        0                      42              16             <- length BEFORE this step
    query_lens      4                      1               2
    query_starts    0                      4               5          7   <- R + 1 entries
    logit_indices            3             4                              <- row 2 is mid-prompt: it needs no logits
    logit_rows               0             1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from executor_svc.sampling.rows import SampleRows
    from executor_svc.sequence import Sequence
    from executor_svc.slots import PlanKey

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class ScoredRow:
    """A prefill row with prompt tokens whose logprobs were asked for. The logits at position p score token p + 1."""

    row: int
    sequence: Sequence
    first: int  # position of the first token that this step scores
    stop: int  # one past the last


@dataclass(slots=True, frozen=True)
class StepMetadata:
    """One step's batch on the host (numpy); backends copy to their device what they need.

    ``input_ids`` holds -1 where the id is not yet known on the host: that row's input is the token which the
    previous step's sampling wrote into the device buffer ``last_tokens[slot]`` (a decode row under overlap).
    """

    input_ids: Int64  # [T]
    positions: Int64  # [T] position of each new token in its own sequence
    slots: Int32  # [R] slot of each row
    seq_lens: Int32  # [R] tokens in the KV cache before this step
    query_lens: Int32  # [R] new tokens of each row, >= 1
    query_starts: Int32  # [R + 1] prefix sum of query_lens
    block_tables: Int32  # [R, max blocks of any row], -1 beyond a row's blocks
    kv_slots: Int64  # [T] where each new token's K and V go: block * block_size + offset
    logit_indices: Int64  # [S] indices into T whose hidden states reach the head
    logit_rows: Int32  # [S] the row each of them belongs to
    num_decode_rows: int  # rows [0, num_decode_rows) are decode rows, the rest prefill rows
    key: PlanKey | None = None  # which plan this is; models do not read it
    sample_rows: SampleRows | None = None  # the rows that sample, in the order of logit_rows; models do not read it
    scored_rows: tuple[ScoredRow, ...] = ()  # ascending; not empty: the step runs in pieces (pieces.py)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def is_prompt_step(self) -> bool:
        """True when the step has prefill rows only (such a step is post-processed at once)."""
        return self.num_decode_rows == 0
