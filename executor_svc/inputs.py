"""prepare_inputs: an applied plan becomes the flat batch of one forward pass, without padding."""

from __future__ import annotations

import numpy as np

from executor_svc.metadata import Int32, Int64, ScoredRow, StepMetadata
from executor_svc.sampling.rows import DrawParams, SampleRows
from executor_svc.sequence import Sequence
from executor_svc.slots import AppliedPlan, Slots


def prepare_inputs(plan: AppliedPlan, slots: Slots) -> StepMetadata:
    """``plan`` must be the one applied to ``slots`` last. Steady decode does no Python work by row."""
    rows, query_lens = plan.slots, plan.query_lens
    num_rows = len(rows)
    seq_lens = slots.computed.take(rows) - query_lens
    query_starts = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(query_lens, out=query_starts[1:])
    block_size = slots.limits.block_size

    if plan.num_decode_rows == num_rows:
        positions = seq_lens.astype(np.int64)
        token_slots = rows
    else:
        starts = np.repeat(seq_lens - query_starts[:-1], query_lens)
        positions = np.arange(query_starts[-1], dtype=np.int64) + starts
        token_slots = np.repeat(rows, query_lens)
    columns = positions // block_size
    kv_slots = slots.block_table[token_slots, columns].astype(np.int64)
    kv_slots *= block_size
    kv_slots += positions - columns * block_size

    width = int(slots.num_blocks.take(rows).max()) if num_rows else 0
    logit_rows = np.flatnonzero(plan.samples).astype(np.int32)
    return StepMetadata(
        input_ids=_input_ids(plan, slots, seq_lens, query_starts),
        positions=positions,
        slots=rows,
        seq_lens=seq_lens,
        query_lens=query_lens,
        query_starts=query_starts,
        block_tables=slots.block_table[:, :width][rows],
        kv_slots=kv_slots,
        logit_indices=query_starts[1:].take(logit_rows).astype(np.int64) - 1,
        logit_rows=logit_rows,
        num_decode_rows=plan.num_decode_rows,
        key=plan.key,
        sample_rows=_sample_rows(rows.take(logit_rows), slots),
        scored_rows=_scored_rows(plan, slots, seq_lens) if plan.num_decode_rows < num_rows else (),
    )


def _scored_rows(plan: AppliedPlan, slots: Slots, seq_lens: Int32) -> tuple[ScoredRow, ...]:
    """Prefill rows that run logits of prompt tokens still to be scored."""
    prefill = plan.slots[plan.num_decode_rows :]
    found = []
    for row in (np.flatnonzero(slots.params.scores.take(prefill)) + plan.num_decode_rows).tolist():
        sequence = _sequence(slots, int(plan.slots[row]))
        first = max(int(seq_lens[row]) + 1, sequence.prompt_scored)
        stop = min(int(seq_lens[row] + plan.query_lens[row]) + 1, sequence.prompt_len)
        if first < stop:
            found.append(ScoredRow(row, sequence, first, stop))
    return tuple(found)


def _input_ids(plan: AppliedPlan, slots: Slots, seq_lens: Int32, query_starts: Int32) -> Int64:
    """int64 [T]; -1 where the token was sampled here and is read from the device's buffer."""
    ids = np.full(int(query_starts[-1]), -1, dtype=np.int64)
    decode = plan.num_decode_rows
    # Decode rows run a token of the admission only just after one whose other tokens were all computed.
    fresh = np.flatnonzero(seq_lens[:decode] < slots.known.take(plan.slots[:decode])).tolist()
    for row in (*fresh, *range(decode, len(plan.slots))):
        start = int(seq_lens[row])
        known = _sequence(slots, int(plan.slots[row])).tokens[start : start + int(plan.query_lens[row])]
        at = int(query_starts[row])
        ids[at : at + len(known)] = known
    return ids


def _sample_rows(rows: Int32, slots: Slots) -> SampleRows:
    positions = slots.computed.take(rows).astype(np.int64)
    params = slots.params
    draws: DrawParams | None = None
    special: tuple[tuple[int, Sequence], ...] = ()
    if not params.plain.take(rows).all():
        draws = params.draws_of(rows)
        special = tuple((i, _sequence(slots, int(rows[i]))) for i in np.flatnonzero(params.special.take(rows)).tolist())
    return SampleRows(
        slots=rows,
        generations=slots.generation.take(rows),
        positions=positions,
        outputs=positions - slots.prompt_len.take(rows),
        draws=draws,
        special=special,
    )


def _sequence(slots: Slots, slot: int) -> Sequence:
    sequence = slots.sequences[slot]
    assert sequence is not None, f"slot {slot} is active without a sequence"
    return sequence
