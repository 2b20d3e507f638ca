"""The sampler against a float64 reference of the contract, at its edges, and row by row alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.errors import RowError
from executor_svc.sampling.adjust import _adjust
from executor_svc.sampling.draw import _OCTAVES, _SCALE, MAX_WEIGHT, _draw_rows, _weight, draw_rows
from executor_svc.sampling.exp2 import EXP2
from executor_svc.sampling.philox import draw_bits
from executor_svc.sampling.rows import SampleRows, SlotParams
from executor_svc.sampling.rules import TokenCounts, parse_rules
from executor_svc.sampling.sampler import SamplerOutput, sample, warm_up
from executor_svc.sequence import Sequence
from protos.step import ALL_MASKED, BAD_PARAMETER, NON_FINITE, Admission, RowLogprobs, SamplingParams
from protos.wire import pack_int32
from tests.executor import sampling_reference as reference


def floats(values: Any) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


class Row:
    """One sampling row: parameters and history."""

    def __init__(self, params: SamplingParams, prompt: list[int], outputs: list[int], choice: int = 0) -> None:
        self.params, self.prompt, self.outputs, self.choice = params, prompt, outputs, choice

    def bits(self) -> int:
        key = (self.params.seed, self.choice, len(self.outputs))
        return int(draw_bits(*(np.array([x], dtype=np.uint64) for x in key))[0])


def run(logits: np.ndarray, rows: list[Row], outputs: Iterable[int] | None = None) -> SamplerOutput:
    """Row i in slot i + 3. ``outputs``: output positions other than the rows' histories have."""
    table = SlotParams(len(rows) + 3)
    special = []
    for i, row in enumerate(rows):
        prompt, drawn = np.array(row.prompt, dtype=np.int32), np.array(row.outputs, dtype=np.int32)
        rules, fault = None, None
        try:
            rules = parse_rules(row.params, prompt, drawn, logits.shape[1])
        except RowError as error:
            fault = error
        sequence = Sequence(i + 3, 1, "r", len(prompt), prompt, rules, fault)
        if rules or fault:
            special.append((i, sequence))
        admission = Admission(i + 3, 1, "r", row.choice, b"", b"", 0, b"", row.params)
        table.admit(admission, sequence)
    slots = np.arange(3, len(rows) + 3, dtype=np.int32)
    return sample(
        logits.copy(),
        SampleRows(
            slots=slots,
            generations=np.ones(len(rows), dtype=np.int32),
            positions=np.array([len(r.prompt) + len(r.outputs) for r in rows], dtype=np.int64),
            outputs=np.array(list(outputs or (len(r.outputs) for r in rows)), dtype=np.int64),
            draws=table.draws_of(slots),
            special=tuple(special),
        ),
    )


VOCAB = 40
EVERY = list(range(VOCAB))
any_id = st.one_of(st.sampled_from([0, VOCAB - 1]), st.integers(0, VOCAB - 1))
ids = st.lists(any_id, max_size=6, unique=True)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    bias_ids = draw(ids)
    bias = draw(st.lists(st.sampled_from([-100.0, 100.0, -np.inf, 0.5, -3.0]), min_size=6, max_size=6))
    penalised = draw(st.booleans())
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 0.7, 1.0, 1.7, 100.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, VOCAB, VOCAB + 1, 2**31 - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999999999, 0.9, 0.5, 0.1, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        min_tokens=draw(st.integers(0, 4)),
        masked_until_min_tokens=pack_int32(draw(ids)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])) if penalised else 1.0,
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -1.5])) if penalised else 0.0,
        presence_penalty=draw(st.sampled_from([0.0, 2.0, -0.5])) if penalised else 0.0,
        logit_bias_ids=pack_int32(bias_ids),
        logit_bias=floats(bias[: len(bias_ids)]),
        allowed_ids=pack_int32(draw(ids)),
        logprobs=draw(st.sampled_from([-1, -1, 0, 3, VOCAB, 1024])),
    )


def all_but(kept: int, how: str) -> dict[str, Any]:
    """Parameters that mask every id but one, or but the first and last."""
    others = [i for i in EVERY if i != kept]
    if how == "allowed_ids":
        return {"allowed_ids": pack_int32([kept])}
    if how == "logit_bias":
        return {"logit_bias_ids": pack_int32(others), "logit_bias": floats([-np.inf] * len(others))}
    if how == "min_tokens":
        return {"masked_until_min_tokens": pack_int32(others), "min_tokens": 2**31 - 1}
    return {"allowed_ids": pack_int32([VOCAB - 1, 0])}


@st.composite
def row_and_logits(draw: st.DrawFn) -> tuple[Row, np.ndarray]:
    params = draw(parameters())
    mask = draw(st.sampled_from(["", "", "", "allowed_ids", "logit_bias", "min_tokens", "ends"]))
    if mask:
        params = msgspec.structs.replace(params, **all_but(draw(any_id), mask))
    history = st.lists(any_id, max_size=5)
    outputs = draw(history)
    if draw(st.booleans()):  # long: penalties of what came hundreds of times
        few = np.random.default_rng(draw(st.integers(0, 2**32))).integers(0, draw(st.sampled_from([2, VOCAB])), 400)
        outputs = [*outputs, *few.tolist()]
    row = Row(params, [*draw(history), draw(any_id)], outputs, draw(st.integers(0, 3)))
    match draw(st.sampled_from(["levels", "equal", "normal", "wide"])):
        case "levels":
            logits = np.array(draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=VOCAB, max_size=VOCAB)))
        case "equal":
            logits = np.full(VOCAB, draw(st.sampled_from([0.0, -0.0, 3.5, -1e30])))
        case kind:
            rng = np.random.default_rng(draw(st.integers(0, 2**32)))
            logits = rng.normal(0, 4 if kind == "normal" else 1000, VOCAB)
            logits[rng.integers(0, VOCAB, draw(st.sampled_from([0, 9])))] = -np.inf
    return row, logits.astype(np.float32)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(row_and_logits(), min_size=1, max_size=5))
def test_every_parameter_mixed_against_the_reference(batch: list[tuple[Row, np.ndarray]]) -> None:
    rows = [row for row, _ in batch]
    logits = np.stack([row_logits for _, row_logits in batch])
    got = run(logits, rows)
    for i, row in enumerate(rows):
        expected = reference.adjusted(logits[i], row.params, row.prompt, row.outputs)
        if max(expected) == -np.inf:
            assert not got.ok[i]
            assert [f.status for f in got.faults if f.slot == i + 3] == [ALL_MASKED]
            continue
        assert int(got.tokens[i]) in reference.acceptable(expected, row.params, row.bits())
        if row.params.logprobs >= 0:
            (entry,) = (e for e in got.logprobs if e.slot == i + 3)
            check_logprobs(entry.rows, logits[i], int(got.tokens[i]), row)
    alone = [run(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    assert [int(a.tokens[0]) for a in alone] == got.tokens.tolist()
    assert [e.rows for a in alone for e in a.logprobs] == [e.rows for e in got.logprobs]


def check_logprobs(found: tuple[RowLogprobs, ...], raw: np.ndarray, token: int, row: Row) -> None:
    """Of the raw logits, whatever the row's parameters."""
    (entry,) = found
    expected, order = reference.logprobs(raw)
    top = order[: row.params.logprobs]
    assert entry.position == len(row.prompt) + len(row.outputs)
    assert entry.chosen == pytest.approx(expected[token], rel=1e-12, abs=1e-11)
    assert entry.rank == order.index(token) + 1
    assert np.frombuffer(entry.top_ids, "<i4").tolist() == top
    assert np.frombuffer(entry.top_values, "<f4") == pytest.approx([expected[i] for i in top], rel=1e-6, abs=1e-6)


def test_penalties_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        logits = rng.normal(0, 5, (1, VOCAB)).astype(np.float32)
        prompt, outputs = rng.integers(0, VOCAB, 9).tolist(), rng.integers(0, VOCAB, 60).tolist()
        params = SamplingParams(
            temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.8, logprobs=0
        )
        expected = reference.adjusted(logits[0], params, prompt, outputs)
        assert int(run(logits, [Row(params, prompt, outputs)]).tokens[0]) == int(np.argmax(expected))


@pytest.mark.parametrize("known", [0, 63, 64, 127, 128])
def test_counts_grow_with_the_history(known: int) -> None:
    """Whether tokens came at admission or one by one, past every size that the arrays have."""
    later = [int(x) for x in np.random.default_rng(known).integers(0, 500, 300)]
    counts = TokenCounts.of(np.arange(known, dtype=np.int32), np.array(later[:100], dtype=np.int32))
    for token in later[100:]:
        counts.add_output(token)
    got = {int(counts.ids[at]): int(counts.outputs[at]) for at in counts.index.values()}
    assert got == {token: later.count(token) for token in [*range(known), *later]}


# ---------------------------------------------------------------------------------------------------------------------
# Edges


def test_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((3, VOCAB), dtype=np.float32)
    logits[1, [7, 30]] = 5.0
    logits[2, -1] = 1.0
    assert run(logits, [Row(SamplingParams(temperature=t), [1], []) for t in (0.0, 9e-6, 0.0)]).tokens.tolist() == [
        0,
        7,
        VOCAB - 1,
    ]


def test_equal_logits_draw_every_id_in_order() -> None:
    logits = np.zeros((1, 8), dtype=np.float32)
    for eighth in range(8):
        bits = np.array([(eighth << 61) + 5], dtype=np.uint64)
        one = np.ones(1)
        args = (np.zeros(1, dtype=np.int64), logits[:, 0], one, np.zeros(1, dtype=np.int64), one, one * 0, bits)
        assert draw_rows(logits, *args).tolist() == [eighth]


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
@pytest.mark.parametrize("top_p", [1.0, 0.999999999, 1e-9])
@pytest.mark.parametrize("top_k", [0, 1, 3, 10**9])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 100.0])
def test_extreme_bits_always_give_a_kept_id(bits: int, top_p: float, top_k: int, temperature: float) -> None:
    logits = np.random.default_rng(1).normal(0, 50, (1, 5000)).astype(np.float32)
    logits[0, ::7] = -np.inf
    got = draw_rows(
        logits,
        np.zeros(1, dtype=np.int64),
        logits.max(axis=1),
        np.array([temperature]),
        np.array([top_k]),
        np.array([top_p]),
        np.zeros(1),
        np.array([bits], dtype=np.uint64),
    )
    params = SamplingParams(temperature=temperature, top_k=min(top_k, 5000), top_p=top_p)
    assert np.isfinite(logits[0, got[0]])
    assert int(got[0]) in reference.acceptable(logits[0].tolist(), params, bits) or bits  # at the far end any last id


def test_weights_are_monotone_and_near_the_exponential() -> None:
    """A bucket is found by the floor of the exponent, so weights must not fall across a border."""
    before, _ = _weight(0.0, EXP2, _SCALE)
    assert before == MAX_WEIGHT
    for n in range(-1, -_OCTAVES * 64, -1):
        low, _ = _weight(float(n), EXP2, _SCALE)
        high, floor = _weight(float(np.nextafter(n + 1.0, -np.inf)), EXP2, _SCALE)
        assert floor == n
        assert low <= high <= before
        assert abs(low - 2.0 ** (n / 64) * MAX_WEIGHT) <= 0.51
        before = low


def assert_frequencies(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-squared, at the 0.999 quantile (Wilson and Hilferty's approximation). What cannot come did not."""
    possible = expected > 0
    assert not counts[~possible].any()
    freedom = int(possible.sum()) - 1
    if freedom:
        statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
        assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


FREQUENCIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 100.0},
    "top_k": {"top_k": 5, "temperature": 0.8},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "nearly all of top_p": {"top_p": 0.999999999},
    "min_p": {"min_p": 0.15},
    "filters together": {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.7},
    "one left": {"top_k": 1},
    "penalties and bias": {
        "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.7, "top_p": 0.95,
        "logit_bias_ids": pack_int32([0, 15, 3]), "logit_bias": floats([2.0, 1.0, -np.inf]),
    },
    "the first and the last id": {"allowed_ids": pack_int32([0, 15]), "temperature": 1.5},
    "equal": {"equal": True},
    "the lowest of equal": {"equal": True, "top_k": 6, "min_p": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("key", ["seed", "choice", "outputs"])
@pytest.mark.parametrize("name", FREQUENCIES)
def test_draws_follow_the_distribution(name: str, key: str) -> None:
    """Whichever part of (seed, choice index, output position) differs from draw to draw."""
    n, vocab = 1500, 16
    params = dict(FREQUENCIES[name])
    row = np.random.default_rng(2).normal(0, 1.5, vocab).astype(np.float32)
    if params.pop("equal", False):
        row[:] = 1.25
    history = [1, 5, 5, 0, 7]
    base = SamplingParams(seed=77, **params)
    expected = np.zeros(vocab)
    for token, probability in reference.candidates(reference.adjusted(row, base, [2], history), base).items():
        expected[token] = probability
    rows = [Row(base, [2], history) for _ in range(n)]
    for i, one in enumerate(rows):
        if key == "seed":
            one.params = msgspec.structs.replace(base, seed=i << 40 | i)
        elif key == "choice":
            one.choice = i
    tokens = run(np.repeat(row[None], n, axis=0), rows, range(n) if key == "outputs" else None).tokens
    assert_frequencies(np.bincount(tokens, minlength=vocab), expected * n)


def test_successive_draws_and_choices_are_independent() -> None:
    """Pairs of tokens, of neighbouring positions and of neighbouring choices, have the product of the frequencies."""
    n, vocab = 20_000, 6
    row = np.random.default_rng(3).normal(0, 1, vocab).astype(np.float32)
    p = np.exp(row.astype(np.float64))
    p /= p.sum()
    one = np.ones(n)
    at = np.arange(n)

    def tokens(choice: int) -> np.ndarray:
        bits = draw_bits(np.full(n, 9, np.uint64), np.full(n, choice, np.uint64), at.astype(np.uint64))
        logits = np.repeat(row[None], n, axis=0)
        return draw_rows(logits, at, logits.max(axis=1), one, np.zeros(n, dtype=np.int64), one, one * 0, bits)

    first, second = tokens(0), tokens(1)
    expected = np.outer(p, p).ravel()
    assert_frequencies(np.bincount(first[0::2] * vocab + first[1::2], minlength=vocab**2), expected * (n // 2))
    assert_frequencies(np.bincount(first * vocab + second, minlength=vocab**2), expected * n)


def test_warming_up_compiles_what_a_draw_runs() -> None:
    warm_up(VOCAB)
    compiled = list(_draw_rows.signatures), list(_adjust.signatures)
    logits = torch.zeros(3, VOCAB).numpy()
    params = {"top_p": 0.5, "presence_penalty": 0.5, "min_tokens": 9, "allowed_ids": pack_int32([5, 3])}
    params |= {
        "logit_bias_ids": pack_int32([1]),
        "logit_bias": floats([1.0]),
        "masked_until_min_tokens": pack_int32([2]),
    }
    run(logits, [Row(SamplingParams(seed=i, **params), [1], [i]) for i in range(3)])
    assert (_draw_rows.signatures, _adjust.signatures) == compiled


def test_draws_are_pinned() -> None:
    """A continuation on another machine must draw the same: a change of these ids is a new DRAW_VERSION."""
    logits = ((np.arange(4000).reshape(4, 1000) * 7919 % 1009) / 100).astype(np.float32)
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=40, top_p=0.9),
        SamplingParams(seed=3, min_p=0.02, temperature=1.5),
        SamplingParams(seed=2**64 - 1, top_p=0.5),
    ]
    got = run(logits, [Row(p, [1], [4] * i, choice=i) for i, p in enumerate(params)])
    assert got.tokens.tolist() == [752, 108, 230, 680]


# ---------------------------------------------------------------------------------------------------------------------
# Faults of a row


def test_rows_that_are_not_finite_fault_alone() -> None:
    logits = np.random.default_rng(0).normal(0, 1, (6, VOCAB)).astype(np.float32)
    good = run(logits, [Row(SamplingParams(seed=i), [1], []) for i in range(6)]).tokens
    logits[0, 5] = np.nan
    logits[2, 9] = np.inf
    logits[3] = -np.inf
    logits[4, 1] = -np.inf  # one id that cannot be drawn is no fault
    got = run(logits, [Row(SamplingParams(seed=i), [1], []) for i in range(6)])
    assert got.ok.tolist() == [False, True, False, False, True, True]
    assert [(f.slot, f.status) for f in got.faults] == [(3, NON_FINITE), (5, NON_FINITE), (6, NON_FINITE)]
    assert got.tokens[[1, 5]].tolist() == good[[1, 5]].tolist()


BAD: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": "g1"},
    "logit_bias": {"logit_bias_ids": pack_int32([1, 2]), "logit_bias": floats([1.0])},
    "logit_bias_ids": {"logit_bias_ids": pack_int32([1, 1]), "logit_bias": floats([1.0, 2.0])},
    "bias is NaN": {"logit_bias_ids": pack_int32([1]), "logit_bias": floats([np.nan])},
    "bias is infinite": {"logit_bias_ids": pack_int32([1]), "logit_bias": floats([np.inf])},
    "allowed_ids": {"allowed_ids": pack_int32([VOCAB])},
    "masked_until_min_tokens": {"masked_until_min_tokens": b"abc"},
    "temperature": {"temperature": float("nan")},
    "top_p": {"top_p": float("nan")},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (2, VOCAB)).astype(np.float32)
    got = run(logits, [Row(SamplingParams(**BAD[name]), [1], []), Row(SamplingParams(temperature=0.0), [1], [])])
    assert [(f.slot, f.status) for f in got.faults] == [(3, BAD_PARAMETER)]
    assert name.split()[0] in got.faults[0].detail
    assert got.ok.tolist() == [False, True]


def test_a_bias_that_masks_everything_and_a_penalty_that_overflows_are_told_apart() -> None:
    logits = np.full((2, VOCAB), 3e38, dtype=np.float32)
    everything = SamplingParams(
        logit_bias_ids=pack_int32(range(VOCAB)), logit_bias=floats([-np.inf] * VOCAB), temperature=0.0
    )
    overflow = SamplingParams(repetition_penalty=0.5, temperature=0.0)
    got = run(logits, [Row(everything, [1], []), Row(overflow, [1], [])])
    assert [(f.slot, f.status) for f in got.faults] == [(3, ALL_MASKED), (4, NON_FINITE)]


# ---------------------------------------------------------------------------------------------------------------------
# Logprobs


def test_logprobs_are_raw_and_ranked() -> None:
    logits = np.random.default_rng(4).normal(0, 3, (1, VOCAB)).astype(np.float32)
    logits[0, [4, 9]] = logits[0].max() + 1.0  # a tie at the top
    params = SamplingParams(
        temperature=0.0, logprobs=5, logit_bias_ids=pack_int32([9, 20]), logit_bias=floats([1.0, 100.0])
    )
    got = run(logits, [Row(params, [1, 2, 3], [8])])
    assert got.tokens.tolist() == [20]
    (entry,) = got.logprobs
    (row,) = entry.rows
    wide = logits[0].astype(np.float64)
    expected = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
    order = sorted(range(VOCAB), key=lambda i: (-wide[i], i))
    assert (entry.slot, entry.generation, row.position) == (3, 1, 4)
    assert row.chosen == pytest.approx(expected[20], abs=1e-12)
    assert row.rank == order.index(20) + 1
    assert np.frombuffer(row.top_ids, "<i4").tolist() == order[:5]
    assert order[:2] == [4, 9]
    assert np.frombuffer(row.top_values, "<f4") == pytest.approx(expected[order[:5]], abs=1e-6)
