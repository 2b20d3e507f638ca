"""The digest finds every single difference, and differences of many."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.digest import epoch_digest, plan_digest
from protos.wire import Epoch

SLOTS = 12
START, FIRST, LONG = 0x02E9F42F99DC9983, 0x1947B785839490E2, 0x40B018B082F6F3A9
words = st.integers(-1, 2**31 - 1)
tables = st.lists(st.lists(words, min_size=SLOTS, max_size=SLOTS), min_size=3, max_size=3)
slots = st.lists(st.integers(0, SLOTS - 1), max_size=20)


def digest(previous: int, seq: int, released: list[int], touched: list[int], columns: list[list[int]]) -> int:
    arrays = [np.array(values, dtype=np.int32) for values in (released, touched, *columns)]
    return plan_digest(previous, seq, *arrays)


@settings(max_examples=200)
@given(st.integers(0, 2**64 - 1), st.integers(1, 2**31 - 1), slots, slots, tables, st.data())
def test_one_changed_word_of_a_touched_slot_changes_the_digest(
    previous: int, seq: int, released: list[int], touched: list[int], columns: list[list[int]], data: st.DataObject
) -> None:
    whole = digest(previous, seq, released, touched, columns)
    assert 0 <= whole < 2**64
    assert whole == digest(previous, seq, released, touched, columns)
    assert whole != digest(previous ^ 1 << data.draw(st.integers(0, 63)), seq, released, touched, columns)
    assert whole != digest(previous, seq + 1, released, touched, columns)
    once = [slot for slot in set(released + touched) if (released + touched).count(slot) == 1]
    if once:
        slot, column = data.draw(st.sampled_from(once)), data.draw(st.integers(0, 2))
        changed = [list(values) for values in columns]
        changed[column][slot] = data.draw(words.filter(lambda word: word != columns[column][slot]))
        assert whole != digest(previous, seq, released, touched, changed)


def test_random_changes_orders_and_cuts_never_meet() -> None:
    draw = np.random.default_rng(0)
    seen = set()
    for _ in range(3000):
        columns = [draw.integers(0, 4, SLOTS).tolist() for _ in range(3)]
        touched = draw.permutation(SLOTS)[: draw.integers(1, SLOTS)].tolist()
        cut = int(draw.integers(0, len(touched)))
        case = (tuple(touched[:cut]), tuple(touched[cut:]), tuple(tuple(c[s] for s in touched) for c in columns))
        seen.add((case, digest(1, 1, touched[:cut], touched[cut:], columns)))
    assert len({value for _, value in seen}) == len({case for case, _ in seen})


def test_the_same_on_every_machine() -> None:
    """Both sides may run on different hardware: these values are part of the protocol."""
    start = epoch_digest(Epoch(2**64 - 1, 3))
    columns = [[i * 7 % 5 for i in range(SLOTS)], list(range(SLOTS)), [-1, *range(100, 100 + SLOTS - 1)]]
    assert start == START
    assert digest(start, 1, [3, 4], [0, 5, 5, 6], columns) == FIRST
    assert digest(start, 1, [], list(range(SLOTS)) * 400, columns) == LONG
