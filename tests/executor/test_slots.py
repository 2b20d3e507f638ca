"""The mirror: deltas in the contract's order, and a typed error for everything that contradicts it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from executor_svc.errors import PlanError
from executor_svc.slots import SlotLimits, Slots
from protos.step import BAD_PLAN, BAD_SEQUENCE, DIGEST_MISMATCH, StepPlan
from protos.wire import Epoch, pack_int32
from tests.executor.scripted import Planner

LIMITS = SlotLimits(num_blocks=40, block_size=4, max_slots=8, max_batch_tokens=64, vocab_size=100, context_length=40)


def fresh() -> tuple[Slots, Planner]:
    slots, planner = Slots(LIMITS), Planner()
    slots.clear(planner.epoch)
    return slots, planner


def started() -> tuple[Slots, Planner]:
    """Slot 2 holds a prompt of 6 in blocks 5 and 6, prefilled and sampled once: 7 tokens known, 6 computed."""
    slots, planner = fresh()
    slots.apply(planner.plan(admitted=[planner.admission(2, [1, 2, 3, 4, 5, 6], [5, 6])], prefill=[(2, 6)]))
    return slots, planner


def test_a_sequence_from_admission_to_release() -> None:
    slots, planner = started()
    assert (slots.computed[2], slots.length[2], slots.prompt_len[2]) == (6, 7, 6)
    assert slots.block_table[2, :3].tolist() == [5, 6, -1]
    slots.apply(planner.plan(decode=[2]))
    applied = slots.apply(planner.plan(decode=[2]))
    assert applied.samples.tolist() == [True]
    slots.apply(planner.plan(appended=[(2, 9)], decode=[2]))
    assert (slots.computed[2], slots.length[2], slots.num_blocks[2], slots.last_block[2]) == (9, 10, 3, 9)
    assert slots.blocks_used == 3
    slots.apply(planner.plan(released=[2]))
    assert (slots.slots_used, slots.blocks_used, slots.num_blocks[2], slots.last_block[2]) == (0, 0, 0, -1)
    assert (slots.block_table == -1).all()
    assert slots.sequences[2] is None


def test_what_a_plan_releases_it_may_give_out_itself() -> None:
    slots, planner = started()
    again = planner.admission(2, [9, 9, 9], [6])
    slots.apply(planner.plan(released=[2], admitted=[again], prefill=[(2, 3)]))
    assert slots.generation[2] == 2
    assert slots.block_table[2, :2].tolist() == [6, -1]
    assert slots.length[2] == 4


def test_appended_pairs_of_one_slot_keep_their_order() -> None:
    slots, planner = started()
    slots.apply(planner.plan(admitted=[planner.admission(0, [1], [20])], prefill=[(0, 1)]))
    slots.apply(planner.plan(appended=[(2, 30), (0, 21), (2, 7), (0, 22), (2, 31)]))
    assert slots.block_table[2, :6].tolist() == [5, 6, 30, 7, 31, -1]
    assert slots.block_table[0, :4].tolist() == [20, 21, 22, -1]
    assert slots.last_block[[0, 2]].tolist() == [22, 31]


def test_the_block_table_grows_to_what_the_context_needs() -> None:
    limits = SlotLimits(
        num_blocks=500, block_size=4, max_slots=2, max_batch_tokens=2000, vocab_size=9, context_length=2000
    )
    slots, planner = Slots(limits), Planner()
    slots.clear(planner.epoch)
    slots.apply(planner.plan(admitted=[planner.admission(0, [1] * 4, [0])], prefill=[(0, 4)]))
    slots.apply(planner.plan(appended=[(0, b) for b in range(1, 500)], decode=[0]))
    assert slots.block_table[0, :500].tolist() == list(range(500))
    assert slots.block_table.shape == (2, 500)


def test_a_prefix_may_be_shared_and_never_written() -> None:
    slots, planner = started()
    slots.apply(planner.plan(admitted=[planner.admission(3, [1, 2, 3, 4, 7], [5, 8], computed=4)], prefill=[(3, 1)]))
    assert slots.holders[[5, 6, 8]].tolist() == [2, 1, 1]
    slots.apply(planner.plan(released=[2]))
    with pytest.raises(PlanError, match="block 5 is to be written but is held"):
        slots.apply(planner.plan(admitted=[planner.admission(4, [1, 2], [5])]))


def test_digests_agree_over_random_plans() -> None:
    rng = np.random.default_rng(3)
    slots, planner = fresh()
    free = list(range(LIMITS.num_blocks))
    held: dict[int, list[int]] = {}
    sampled: set[int] = set()
    for _ in range(300):
        released = [s for s in held if rng.random() < 0.15 or slots.length[s] > 30]
        for slot in released:
            free += held.pop(slot)
            sampled.discard(slot)
        admitted = []
        prefill = [(s, int(slots.length[s] - slots.computed[s])) for s in held if s not in sampled]
        for slot in range(LIMITS.max_slots):
            if slot not in held and len(free) > 12 and rng.random() < 0.3:
                prompt = rng.integers(0, 100, rng.integers(2, 8)).tolist()
                held[slot] = [free.pop(), free.pop()]
                admitted.append(planner.admission(slot, prompt, held[slot]))
                prefill.append((slot, len(prompt) if rng.random() < 0.5 else 1))
        decode = [s for s in sampled if s in held]
        appended = []
        for slot in decode:
            if slots.computed[slot] + 1 > 4 * len(held[slot]):
                held[slot].append(free.pop())
                appended.append((slot, held[slot][-1]))
        applied = slots.apply(
            planner.plan(released=released, admitted=admitted, appended=appended, decode=decode, prefill=prefill)
        )
        sampled |= set(applied.slots[applied.samples].tolist())
        assert slots.digest == planner.digest
        assert slots.blocks_used == LIMITS.num_blocks - len(free)


Change = Callable[[Planner], StepPlan]

REFUSED: dict[str, tuple[int, str, Change]] = {
    "lost": (BAD_SEQUENCE, "plan 3 after 1", lambda p: (p.plan(), p.plan(decode=[2]))[1]),
    "repeated": (BAD_SEQUENCE, "plan 1 after 1", lambda p: p.plan(decode=[2], seq=1)),
    "digest": (DIGEST_MISMATCH, "the mirror gives", lambda p: p.plan(decode=[2], digest=5)),
    "release unknown": (BAD_PLAN, "not in use", lambda p: p.plan(released=[3])),
    "release twice": (BAD_PLAN, "released twice", lambda p: p.plan(released=[2, 2])),
    "release out of range": (BAD_PLAN, "a slot outside", lambda p: p.plan(released=[8])),
    "admit in use": (BAD_PLAN, "while in use", lambda p: p.plan(admitted=[p.admission(2, [1], [0])])),
    "admit out of range": (BAD_PLAN, "admitted slot 8 of 8", lambda p: p.plan(admitted=[p.admission(8, [1], [0])])),
    "old generation": (
        BAD_PLAN,
        "generation 1 after 1",
        lambda p: p.plan(released=[2], admitted=[p.admission(2, [1], [0], generation=1)]),
    ),
    "empty prompt": (BAD_PLAN, "empty prompt", lambda p: p.plan(admitted=[p.admission(0, [], [0])])),
    "id too large": (BAD_PLAN, "vocabulary of 100", lambda p: p.plan(admitted=[p.admission(0, [100], [0])])),
    "id negative": (BAD_PLAN, "vocabulary of 100", lambda p: p.plan(admitted=[p.admission(0, [-1], [0])])),
    "output id": (BAD_PLAN, "vocabulary", lambda p: p.plan(admitted=[p.admission(0, [1], [0], outputs=[100])])),
    "broken array": (
        BAD_PLAN,
        "multiple of 4",
        lambda p: p.plan(admitted=[p.admission(0, [1], [0], outputs=b"abc")]),
    ),
    "beyond context": (BAD_PLAN, "the context holds 40", lambda p: p.plan(admitted=[p.admission(0, [1] * 41, [0])])),
    "computed off block": (
        BAD_PLAN,
        "3 computed tokens",
        lambda p: p.plan(admitted=[p.admission(0, [1] * 8, [0, 1], computed=3)]),
    ),
    "computed beyond blocks": (
        BAD_PLAN,
        "8 computed tokens in 1 blocks",
        lambda p: p.plan(admitted=[p.admission(0, [1] * 9, [0], computed=8)]),
    ),
    "all computed": (
        BAD_PLAN,
        "nothing left to run",
        lambda p: p.plan(admitted=[p.admission(0, [1] * 4, [0], computed=4)]),
    ),
    "block out of range": (BAD_PLAN, "block id outside", lambda p: p.plan(admitted=[p.admission(0, [1], [40])])),
    "block negative": (BAD_PLAN, "block id outside", lambda p: p.plan(admitted=[p.admission(0, [1], [-1])])),
    "block twice": (BAD_PLAN, "given twice", lambda p: p.plan(admitted=[p.admission(0, [1], [3, 3])])),
    "block held": (BAD_PLAN, "held by another", lambda p: p.plan(admitted=[p.admission(0, [1], [6])])),
    "too many blocks": (BAD_PLAN, "beyond the context", lambda p: p.plan(admitted=[p.admission(0, [1], [*range(11)])])),
    "append unknown": (BAD_PLAN, "not in use", lambda p: p.plan(appended=[(0, 9)])),
    "append held": (BAD_PLAN, "holds already", lambda p: p.plan(appended=[(2, 5)])),
    "append twice": (BAD_PLAN, "holds already", lambda p: p.plan(appended=[(2, 9), (2, 9)])),
    "append out of range": (BAD_PLAN, "block id outside", lambda p: p.plan(appended=[(2, 40)])),
    "append beyond context": (
        BAD_PLAN,
        "11 blocks of a sequence are beyond",
        lambda p: p.plan(appended=[(2, b) for b in range(10, 19)]),
    ),
    "append odd": (BAD_PLAN, "odd number", lambda p: replace(p.plan(), appended=pack_int32([2]))),
    "prefill odd": (BAD_PLAN, "odd number", lambda p: replace(p.plan(), prefill=pack_int32([2]))),
    "decode unknown": (BAD_PLAN, "run, but not in use", lambda p: p.plan(decode=[5])),
    "decode out of range": (BAD_PLAN, "run: a slot outside", lambda p: p.plan(decode=[8])),
    "decode twice": (BAD_PLAN, "run twice", lambda p: p.plan(decode=[2, 2])),
    "decode and prefill": (BAD_PLAN, "run twice", lambda p: p.plan(decode=[2], prefill=[(2, 1)])),
    "prefill too much": (BAD_PLAN, "more tokens than are known", lambda p: p.plan(prefill=[(2, 2)])),
    "prefill huge": (BAD_PLAN, "more tokens than are known", lambda p: p.plan(prefill=[(2, 2**31 - 1)])),
    "prefill nothing": (BAD_PLAN, "or none", lambda p: p.plan(prefill=[(2, 0)])),
    "prefill negative": (BAD_PLAN, "or none", lambda p: p.plan(prefill=[(2, -1)])),
    "decode mid-prompt": (
        BAD_PLAN,
        "exactly one token",
        lambda p: p.plan(admitted=[p.admission(0, [1, 2], [0])], decode=[0]),
    ),
    "no room": (
        BAD_PLAN,
        "more tokens than its blocks hold",
        lambda p: p.plan(admitted=[p.admission(0, [1] * 5, [0])], prefill=[(0, 5)]),
    ),
    "too many tokens": (
        BAD_PLAN,
        "66 tokens a step, at most 64",
        lambda p: p.plan(
            admitted=[
                p.admission(0, [1] * 33, [*range(10, 19)]),
                p.admission(1, [1] * 33, [*range(20, 29)]),
            ],
            prefill=[(0, 33), (1, 33)],
        ),
    ),
    "max_new length": (BAD_PLAN, "max_new", lambda p: p.plan(decode=[2], max_new=b"\1\1")),
    "max_new zero": (BAD_PLAN, "max_new", lambda p: p.plan(decode=[2], max_new=b"\0")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_contradicts_the_mirror_is_refused(name: str) -> None:
    code, text, change = REFUSED[name]
    slots, planner = started()
    with pytest.raises(PlanError, match=text) as caught:
        slots.apply(change(planner))
    assert caught.value.code == code


def test_nothing_runs_beyond_the_context() -> None:
    slots, planner = fresh()
    slots.apply(planner.plan(admitted=[planner.admission(0, [1] * 40, [*range(10)])], prefill=[(0, 40)]))
    with pytest.raises(PlanError, match="beyond the context of 40"):
        slots.apply(planner.plan(decode=[0]))


def test_a_new_epoch_starts_from_nothing() -> None:
    slots, _ = started()
    slots.clear(Epoch(7, 2))
    planner = Planner(Epoch(7, 2))
    assert (slots.slots_used, slots.blocks_used) == (0, 0)
    slots.apply(planner.plan(admitted=[planner.admission(2, [1], [5])], prefill=[(2, 1)]))
    assert slots.digest == planner.digest
