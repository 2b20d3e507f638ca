"""What changes a row's logits before the draw, in the contract's order (DESIGN 6), in float32 and in place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor_svc.sampling.rules import RowRules


def adjust(row: npt.NDArray[np.float32], rules: RowRules, output_position: int) -> None:
    """Apply bias, allowed ids, the min_tokens mask and penalties to one row [V]; it is changed.

    ``output_position`` is the number of outputs before the one to draw. Ids that may not be drawn become -inf.
    """
    if len(rules.bias_ids):
        row[rules.bias_ids] += rules.bias
    if len(rules.allowed):
        kept = row[rules.allowed]
        row.fill(-np.inf)
        row[rules.allowed] = kept
    if output_position < rules.min_tokens:
        row[rules.masked] = -np.inf
    if rules.counts is not None:
        with np.errstate(over="ignore"):  # what overflows is found by the sampler, as that row's fault
            _penalise(row, rules)


def _penalise(row: npt.NDArray[np.float32], rules: RowRules) -> None:
    """Repetition over prompt and outputs; frequency and presence over outputs alone."""
    assert rules.counts is not None
    size = len(rules.counts.index)
    ids, outputs = rules.counts.ids[:size], rules.counts.outputs[:size]
    values = row[ids]
    if rules.repetition != 1.0:
        penalty = np.float32(rules.repetition)
        values = np.where(values > 0, values / penalty, values * penalty)
    if rules.frequency != 0.0:
        values -= np.float32(rules.frequency) * outputs.astype(np.float32)
    if rules.presence != 0.0:
        values -= np.float32(rules.presence) * (outputs > 0)
    row[ids] = values
