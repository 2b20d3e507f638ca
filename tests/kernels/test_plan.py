"""The host's plan: every query sees every KV position once, and the work is even."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.kernels.plan import (
    EVEN_SHARE,
    MIN_SPLIT,
    SPLIT_UNIT,
    AttentionPlan,
    most_items,
    most_slots,
    plan_attention,
)

ROWS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 60)), min_size=1, max_size=12)


def _plan(past: list[int], lens: list[int], **options: Any) -> tuple[AttentionPlan, np.ndarray]:
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    chosen: dict[str, Any] = {"group": 4, "kv_heads": 2, "window": 0, "tile_rows": 128, "target_blocks": 264}
    plan = plan_attention(starts, np.array(lens, np.int32), np.array(past, np.int32), **(chosen | options))
    return plan, starts


@settings(max_examples=150, deadline=None)
@given(
    ROWS, st.integers(1, 16), st.sampled_from([1, 2, 8]), st.sampled_from([0, 1, 100]), st.sampled_from([0, 64, 128]),
    st.integers(1, 600),
)  # fmt: skip
def test_every_position_once(
    rows: list[tuple[int, int]], group: int, kv_heads: int, window: int, tile_rows: int, target: int
) -> None:
    past, lens = [row[0] for row in rows], [row[1] for row in rows]
    plan, starts = _plan(
        past, lens, group=group, kv_heads=kv_heads, window=window, tile_rows=tile_rows, target_blocks=target
    )
    seen: dict[int, list[tuple[int, int]]] = {}
    slots: dict[int, set[int]] = {}
    for kind, items in (("decode", plan.decode), ("prefill", plan.prefill)):
        for row, first, count, position, begin, end, slot, _ in items.tolist():
            assert position == past[row] + first - starts[row]
            assert starts[row] <= first <= first + count <= starts[row + 1]
            assert 1 <= count * group <= (16 if kind == "decode" else max(tile_rows, group))
            assert kind == "decode" or slot == -1
            for query in range(count):
                seen.setdefault(first + query, []).append((begin, end))
            slots.setdefault(first, set()).add(slot)
    for row in range(len(lens)):
        for query in range(lens[row]):
            position = past[row] + query
            oldest = max(position - window + 1, 0) if window else 0
            parts = sorted(seen[int(starts[row]) + query])
            assert parts[0][0] <= oldest
            assert parts[-1][1] >= position + 1
            assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    used = []
    for first, count, slot, number in plan.merges.tolist():
        assert number > 1
        assert count >= 1
        assert slots.pop(first) == set(range(slot, slot + number))
        used += list(range(slot, slot + number))
    assert sorted(used) == list(range(plan.num_slots))
    assert all(value == {-1} for value in slots.values())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=64), st.integers(1, 8))
def test_skewed_lengths_split_evenly(lengths: list[int], kv_heads: int) -> None:
    plan, _ = _plan(lengths, [1] * len(lengths), kv_heads=kv_heads, target_blocks=264)
    blocks = 264 // kv_heads
    assert len(plan.decode) <= most_items(len(lengths), 264, kv_heads)
    assert plan.num_slots <= most_slots(264, kv_heads)
    longest = int((plan.decode[:, 5] - plan.decode[:, 4]).max())
    assert longest <= max(MIN_SPLIT, EVEN_SHARE * (sum(lengths) + len(lengths) * SPLIT_UNIT) / blocks) + 2 * SPLIT_UNIT


def test_few_equal_rows_fill_the_device_once() -> None:
    for rows in (1, 3, 8, 32, 33):
        plan, _ = _plan([8191] * rows, [1] * rows, kv_heads=8, target_blocks=264)
        assert len(plan.decode) <= 33, "a second wave would run almost alone"
    assert _plan([8191] * 256, [1] * 256, kv_heads=8)[0].num_slots == 0, "equal rows are not cut for nothing"


def test_splits_begin_on_tiles() -> None:
    plan, _ = _plan([10_000], [1], window=4099)
    begins = sorted(plan.decode[:, 4].tolist())
    assert begins[0] == 10_000 - 4098
    assert all(begin % SPLIT_UNIT == 0 for begin in begins[1:])


def test_groups_are_bounded() -> None:
    with pytest.raises(ValueError, match="17 query heads"):
        _plan([5], [1], group=17)
