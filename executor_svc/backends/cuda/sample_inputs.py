"""What the rows of one step ask of their logits, laid end to end as the sampling kernels read it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from executor_svc.sampling.rows import SampleRows
from executor_svc.sampling.rules import RowRules

_NO_PENALTY = (1.0, 0.0, 0.0)  # repetition, frequency, presence


def num_top_of(rows: SampleRows, vocab: int) -> np.ndarray | None:
    """int32 [N]: how many alternatives each row's logprobs name, -1 for no logprobs; None where no row wants any."""
    wanted = {
        i: min(sequence.rules.logprobs, vocab)
        for i, sequence in rows.special
        if sequence.rules is not None and sequence.rules.logprobs >= 0
    }
    if not wanted:
        return None
    out = np.full(len(rows.slots), -1, np.int32)
    out[list(wanted)] = list(wanted.values())
    return out


def logit_arrays(rows: SampleRows, vocab: int) -> list[np.ndarray]:
    """The fields of ``kernels.sampling.LogitRules``, in order; without the last two where no row has allowed ids."""
    count = len(rows.slots)
    if not rows.special:
        return list(_no_rules(count))
    bias_counts, history_counts = np.zeros(count + 1, np.int32), np.zeros(count + 1, np.int32)
    penalties = np.full((count, 3), _NO_PENALTY, np.float32)
    ids, values = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    history, outputs = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    masks: list[np.ndarray] = []
    mask_rows = np.full(count, -1, np.int32)
    for i, sequence in rows.special:
        rules = sequence.rules
        if rules is None or not rules.adjusts(int(rows.outputs[i])):
            continue
        row_ids, row_values = _biased(rules, int(rows.outputs[i]))
        ids.append(row_ids)
        values.append(row_values)
        bias_counts[i + 1] = len(row_ids)
        if rules.counts is not None:
            seen, times = rules.counts.view()
            history.append(seen)
            outputs.append(times)
            history_counts[i + 1] = len(seen)
            penalties[i] = rules.repetition, rules.frequency, rules.presence
        if len(rules.allowed):
            mask_rows[i] = len(masks)
            masks.append(_bit_mask(rules.allowed, vocab))
    arrays = [
        np.cumsum(bias_counts, dtype=np.int32), _some(ids, np.int32), _some(values, np.float32),
        np.cumsum(history_counts, dtype=np.int32), _some(history, np.int32), _some(outputs, np.int32), penalties,
    ]  # fmt: skip
    return [*arrays, np.stack(masks), mask_rows] if masks else arrays


@lru_cache(maxsize=64)
def _no_rules(count: int) -> tuple[np.ndarray, ...]:
    """``logit_arrays`` of rows without rules, which most steps are."""
    starts, none = np.zeros(count + 1, np.int32), np.zeros(1, np.int32)
    return (starts, none, np.zeros(1, np.float32), starts, none, none, np.full((count, 3), _NO_PENALTY, np.float32))


def _biased(rules: RowRules, output_position: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids, none twice, and what is added to each: what min_tokens masks gets -inf, whatever its bias."""
    if output_position >= rules.min_tokens or not len(rules.masked):
        return rules.bias_ids, rules.bias
    masked = np.unique(rules.masked)
    kept = ~np.isin(rules.bias_ids, masked)
    banned = np.full(len(masked), -np.inf, np.float32)
    return np.concatenate((rules.bias_ids[kept], masked)), np.concatenate((rules.bias[kept], banned))


def _bit_mask(allowed: np.ndarray, vocab: int) -> np.ndarray:
    """int32 [ceil(vocab / 32)], bit i % 32 of word i / 32 set for every allowed id."""
    bits = np.zeros(-(-vocab // 32) * 32, bool)
    bits[allowed] = True
    mask: np.ndarray = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    return mask


def _some(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    """End to end; never empty, so that there is something to point at."""
    whole: np.ndarray = np.concatenate(parts).astype(dtype, copy=False)
    return whole if len(whole) else np.zeros(1, dtype)
