"""prepare_inputs: the flat batch of mixed steps."""

from __future__ import annotations

import numpy as np

from executor_svc.inputs import prepare_inputs
from executor_svc.metadata import StepMetadata
from executor_svc.slots import SlotLimits, Slots
from protos.step import SamplingParams, StepPlan
from tests.executor.scripted import Planner


def mirror(block_size: int = 16) -> tuple[Slots, Planner]:
    slots = Slots(SlotLimits(64, block_size, 16, 256, 3000, 512))
    planner = Planner()
    slots.clear(planner.epoch)
    return slots, planner


def inputs(slots: Slots, plan: StepPlan) -> StepMetadata:
    return prepare_inputs(slots.apply(plan), slots)


def test_prefill_and_decode_in_one_step() -> None:
    """A new prompt of 4 in block 7, beside a sequence of 42 computed tokens in blocks 12, 23 and 5."""
    slots, planner = mirror()
    inputs(slots, planner.plan(admitted=[planner.admission(1, [9] * 42, [12, 23, 5])], prefill=[(1, 42)]))
    admitted = [planner.admission(0, [101, 872, 2304, 1198], [7]), planner.admission(4, [7, 9, 11] * 8, [40, 41])]
    got = inputs(slots, planner.plan(admitted=admitted, decode=[1], prefill=[(0, 4), (4, 2)]))
    assert got.input_ids.tolist() == [-1, 101, 872, 2304, 1198, 7, 9]
    assert got.positions.tolist() == [42, 0, 1, 2, 3, 0, 1]
    assert got.seq_lens.tolist() == [42, 0, 0]
    assert got.query_lens.tolist() == [1, 4, 2]
    assert got.query_starts.tolist() == [0, 1, 5, 7]
    assert got.block_tables.tolist() == [[12, 23, 5], [7, -1, -1], [40, 41, -1]]
    assert got.kv_slots.tolist() == [5 * 16 + 10, 112, 113, 114, 115, 640, 641]
    assert got.logit_indices.tolist() == [0, 4]  # slot 4 is mid-prompt: it needs no logits
    assert got.logit_rows.tolist() == [0, 1]
    assert got.num_decode_rows == 1
    assert not got.is_prompt_step
    assert got.sample_rows is not None
    assert got.sample_rows.slots.tolist() == [1, 0]
    assert got.sample_rows.positions.tolist() == [43, 4]
    assert got.sample_rows.outputs.tolist() == [1, 0]
    assert (got.input_ids.dtype, got.positions.dtype, got.kv_slots.dtype) == (np.int64, np.int64, np.int64)
    assert (got.seq_lens.dtype, got.block_tables.dtype, got.query_starts.dtype) == (np.int32, np.int32, np.int32)


def test_chunks_of_a_continued_sequence_run_prompt_then_outputs() -> None:
    slots, planner = mirror(block_size=4)
    admission = planner.admission(3, [1, 2, 3, 4, 5, 6], [8, 9, 10], outputs=[50, 51, 52], computed=4)
    first = inputs(slots, planner.plan(admitted=[admission], prefill=[(3, 3)]))
    assert first.input_ids.tolist() == [5, 6, 50]
    assert first.positions.tolist() == [4, 5, 6]
    assert first.kv_slots.tolist() == [36, 37, 38]
    assert first.is_prompt_step
    assert not len(first.logit_indices)
    second = inputs(slots, planner.plan(prefill=[(3, 2)]))
    assert second.input_ids.tolist() == [51, 52]
    assert second.seq_lens.tolist() == [7]
    assert second.sample_rows is not None
    assert second.sample_rows.outputs.tolist() == [3]  # three outputs stand before the one to draw


def test_a_decode_row_can_run_the_last_token_of_an_admission() -> None:
    slots, planner = mirror(block_size=4)
    got = inputs(slots, planner.plan(admitted=[planner.admission(0, [1, 2, 3, 4, 77], [8, 9], computed=4)], decode=[0]))
    assert got.input_ids.tolist() == [77]
    assert got.positions.tolist() == [4]
    assert inputs(slots, planner.plan(decode=[0])).input_ids.tolist() == [-1]


def test_a_prefill_row_of_one_can_run_a_sampled_token() -> None:
    slots, planner = mirror(block_size=4)
    inputs(slots, planner.plan(admitted=[planner.admission(0, [1, 2], [8])], prefill=[(0, 2)]))
    assert inputs(slots, planner.plan(prefill=[(0, 1)])).input_ids.tolist() == [-1]


def test_a_plan_without_rows() -> None:
    slots, planner = mirror()
    got = inputs(slots, planner.plan())
    assert (got.num_rows, got.num_tokens, got.block_tables.shape) == (0, 0, (0, 0))
    assert got.is_prompt_step


def test_the_table_in_a_batch_is_a_copy() -> None:
    """A later plan changes the mirror; a step that is still held must not see it."""
    slots, planner = mirror()
    first = inputs(slots, planner.plan(admitted=[planner.admission(0, [1, 2], [8])], prefill=[(0, 2)]))
    before = {name: getattr(first, name).copy() for name in ("slots", "seq_lens", "block_tables", "query_lens")}
    seeded = SamplingParams(temperature=1.0, seed=3)
    inputs(
        slots,
        planner.plan(released=[0], admitted=[planner.admission(0, [5], [9], sampling=seeded)], prefill=[(0, 1)]),
    )
    for name, value in before.items():
        assert np.array_equal(getattr(first, name), value)
    assert first.sample_rows is not None
    assert first.sample_rows.generations.tolist() == [1]
    assert first.sample_rows.draws is None
