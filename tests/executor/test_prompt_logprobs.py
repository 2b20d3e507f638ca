"""Logprobs of prompt tokens: which positions are scored, in what pieces, and what a bad one costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.inputs import prepare_inputs
from executor_svc.metadata import StepMetadata
from executor_svc.model_runner import ModelRunner
from executor_svc.pieces import MAX_SCORED, split
from executor_svc.slots import SlotLimits, Slots
from executor_svc.worker import Worker
from protos.step import BAD_PARAMETER, NON_FINITE, EpochLost, RowLogprobs, SamplingParams, StepResult
from protos.wire import unpack_int32
from tests.executor.scripted import GREEDY, Planner
from tests.executor.test_worker import VOCAB, NoisyModel

BLOCKS = 400


def scored(top: int = 0, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, prompt_logprobs=top, **fields)


class Watched(NoisyModel):
    """Counts the positions that it ran, and how many logits it was asked for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[int] = []
        self.ran: list[tuple[int, int]] = []  # (slot, position)
        self.bad: set[int] = set()  # positions whose logits are NaN

    def forward(self, input_ids: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        assert (input_ids >= 0).all()
        self.wanted.append(len(metadata.logit_indices))
        self.ran += zip(
            np.repeat(metadata.slots, metadata.query_lens).tolist(), metadata.positions.tolist(), strict=True
        )
        logits = super().forward(input_ids, metadata)
        rows = [i for i, p in enumerate(metadata.positions[metadata.logit_indices].tolist()) if p in self.bad]
        logits[rows, 3] = torch.nan
        return logits

    def row(self, token: int, position: int) -> np.ndarray:
        """float64 log probabilities after ``token`` at ``position``."""
        one = np.array([position])
        metadata = StepMetadata(
            input_ids=np.array([token]),
            positions=one,
            slots=np.zeros(1, np.int32),
            seq_lens=one.astype(np.int32),
            query_lens=np.ones(1, np.int32),
            query_starts=np.array([0, 1], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            kv_slots=np.zeros(1, np.int64),
            logit_indices=np.zeros(1, np.int64),
            logit_rows=np.zeros(1, np.int32),
            num_decode_rows=1,
        )
        wide = NoisyModel.forward(self, torch.tensor([token]), metadata)[0].double()
        expected: np.ndarray = torch.log_softmax(wide, 0).numpy()
        return expected


class Bench:
    def __init__(self, overlap: bool = False) -> None:
        self.model = Watched()
        self.sent: list[StepResult | EpochLost] = []
        limits = SlotLimits(BLOCKS, 4, 16, 1024, VOCAB, 1024)
        self.worker = Worker(Slots(limits), ModelRunner(self.model, 16), self.sent.append, overlap)
        self.planner = Planner()
        self.worker.begin_epoch(self.planner.epoch)

    def run(self, **kwargs: Any) -> StepResult:
        self.worker.execute_plan(self.planner.plan(**kwargs))
        self.worker.finish_previous()
        result = self.sent[-1]
        assert isinstance(result, StepResult), result
        return result

    def rows(self, slot: int = 0) -> list[RowLogprobs]:
        return [
            row for result in self.sent if isinstance(result, StepResult)
            for entry in result.logprobs if entry.slot == slot for row in entry.rows
        ]  # fmt: skip

    def check(self, rows: list[RowLogprobs], tokens: list[int], first: int, top: int) -> None:
        """``rows`` are those of tokens[first:], in order."""
        assert [row.position for row in rows] == list(range(first, len(tokens)))
        for row in rows:
            expected = self.model.row(tokens[row.position - 1], row.position - 1)
            token = tokens[row.position]
            assert row.chosen == pytest.approx(expected[token], abs=1e-6)
            order = np.lexsort((np.arange(VOCAB), -expected))
            assert row.rank == 1 + order.tolist().index(token)
            assert unpack_int32(row.top_ids).tolist() == order[:top].tolist()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def blocks(at: int, length: int) -> list[int]:
    return list(range(at, at + -(-length // 4)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunks", [[300], [1] * 9 + [291], [63, 64, 65, 108], [64, 64, 64, 64, 44]])
def test_every_position_once_however_the_prompt_is_cut(chunks: list[int], overlap: bool) -> None:
    bench = Bench(overlap)
    tokens = prompt(300)
    admitted = [bench.planner.admission(0, tokens, blocks(0, 304), sampling=scored(3, logprobs=2))]
    for chunk in chunks:
        bench.run(admitted=admitted, prefill=[(0, chunk)])
        admitted = []
    first = unpack_int32(bench.sent[-1].tokens).tolist()  # type: ignore[union-attr]
    bench.check(bench.rows()[:-1], tokens, 1, 3)
    bench.check(bench.rows()[-1:], [*tokens, *first], 300, 2)
    assert max(bench.model.wanted) <= MAX_SCORED + 1
    assert sorted(bench.model.ran) == [(0, p) for p in range(300)]


def test_neighbours_keep_their_tokens_and_get_no_logprobs() -> None:
    """Decode and prefill rows beside three scored prompts, in one step: as if each had run alone."""
    bench = Bench()
    planner = bench.planner
    tokens = {slot: prompt(40 + 30 * slot, seed=slot) for slot in range(5)}
    bench.run(admitted=[planner.admission(4, [5, 6], [300], sampling=SamplingParams(seed=8))], prefill=[(4, 2)])
    samplings = [scored(0), GREEDY, scored(1), SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=0)]
    result = bench.run(
        admitted=[planner.admission(s, tokens[s], blocks(60 * s, 200), sampling=samplings[s]) for s in range(4)],
        decode=[4],
        prefill=[(s, len(tokens[s])) for s in range(4)],
    )
    assert unpack_int32(result.slots).tolist() == [4, 0, 1, 2, 3]
    got = dict(zip(unpack_int32(result.slots).tolist(), unpack_int32(result.tokens).tolist(), strict=True))
    for slot in range(4):
        assert got[slot] == int(bench.model.row(tokens[slot][-1], len(tokens[slot]) - 1).argmax())
    bench.check(bench.rows(0), tokens[0], 1, 0)
    bench.check(bench.rows(2), tokens[2], 1, 1)
    bench.check(bench.rows(3)[:-1], tokens[3], 1, 2)
    assert not bench.rows(1)
    assert not bench.rows(4)
    assert max(bench.model.wanted) <= MAX_SCORED + 5


@pytest.mark.parametrize(("computed", "from_position"), [(0, 90), (88, 90), (88, 89), (0, 150), (100, 151), (0, 0)])
def test_a_continued_prompt_is_scored_from_where_it_was(computed: int, from_position: int) -> None:
    bench = Bench()
    tokens, outputs = prompt(150), [7, 8, 9]
    admission = bench.planner.admission(
        0, tokens, blocks(0, 160), outputs=outputs, computed=computed, sampling=scored(2), prompt_scored=from_position
    )
    bench.run(admitted=[admission], prefill=[(0, 153 - computed)])
    bench.check(bench.rows(), tokens, max(from_position, 1), 2)


def test_a_prompt_of_one_token_has_none() -> None:
    bench = Bench()
    result = bench.run(admitted=[bench.planner.admission(0, [4], [0], sampling=scored(2))], prefill=[(0, 1)])
    assert not result.logprobs
    assert len(result.slots) == 4


def test_positions_that_came_computed_cannot_be_scored() -> None:
    bench = Bench()
    admission = bench.planner.admission(0, prompt(20), blocks(0, 24), computed=8, sampling=scored(), prompt_scored=8)
    result = bench.run(admitted=[admission], prefill=[(0, 12)])
    assert [(f.slot, f.status) for f in result.faults] == [(0, BAD_PARAMETER)]
    assert "prompt_logprobs" in result.faults[0].detail
    assert not result.logprobs


@pytest.mark.parametrize("ends", [False, True])
def test_a_prompt_position_without_finite_logits_faults_its_row(ends: bool) -> None:
    """Also in the plan that was on its way before anyone knew, and nobody beside it."""
    bench = Bench()
    bench.model.bad = {70}
    planner = bench.planner
    admitted = [
        planner.admission(0, prompt(120), blocks(0, 128), sampling=scored(1, logprobs=1)),
        planner.admission(1, prompt(50), blocks(40, 60), sampling=scored(1)),
    ]
    result = bench.run(admitted=admitted, prefill=[(0, 120 if ends else 100), (1, 50)])
    assert [(f.slot, f.status) for f in result.faults] == [(0, NON_FINITE)]
    assert "position 70" in result.faults[0].detail
    assert not bench.rows(0)
    assert len(bench.rows(1)) == 49
    assert unpack_int32(result.slots).tolist() == [1]
    result = bench.run(**({"decode": [0, 1]} if ends else {"decode": [1], "prefill": [(0, 20)]}))
    assert [(f.slot, f.status) for f in result.faults] == [(0, NON_FINITE)]
    assert unpack_int32(result.slots).tolist() == [1]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int, int, bool]], int]:
    """((prompt length, first count, prompt_scored, wanted) of each slot, most)."""
    row = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 31), st.booleans())
    return draw(st.lists(row, min_size=1, max_size=6)), draw(st.integers(1, 20))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps())
def test_pieces_run_every_token_once_and_score_what_is_asked(step: tuple[Any, int]) -> None:
    wanted, most = step
    slots = Slots(SlotLimits(BLOCKS, 4, 16, 1024, VOCAB, 1024))
    planner = Planner()
    slots.clear(planner.epoch)
    admitted, prefill = [], []
    for slot, (length, count, first, asks) in enumerate(wanted):
        sampling = scored() if asks else GREEDY
        admitted.append(
            planner.admission(slot, prompt(length), blocks(slot * 8, length), sampling=sampling, prompt_scored=first)
        )
        prefill.append((slot, min(count, length)))
    metadata = prepare_inputs(slots.apply(planner.plan(admitted=admitted, prefill=prefill)), slots)
    pieces = split(metadata, most)
    assert len(pieces) >= 1
    ran: list[int] = []
    tokens_scored: list[tuple[int, int]] = []
    sampled: list[int] = []
    seen: list[tuple[int, int]] = []
    for piece in pieces:
        part = piece.metadata
        ran += part.kv_slots.tolist()
        sampled += piece.sampling.tolist()
        assert len(set(part.slots.tolist())) == len(part.slots)
        assert len(part.logit_indices) == len(piece.sampling) + sum(p.count for p in piece.parts)
        assert sum(p.count for p in piece.parts) <= most
        of_row = np.repeat(part.slots, part.query_lens).tolist()
        positions = part.positions.tolist()
        assert part.input_ids.tolist() == [prompt(wanted[s][0])[p] for s, p in zip(of_row, positions, strict=True)]
        assert part.positions[part.query_starts[:-1]].tolist() == part.seq_lens.tolist()
        for slot, position, kv_slot in zip(of_row, positions, part.kv_slots.tolist(), strict=True):
            row = part.slots.tolist().index(slot)
            assert kv_slot == part.block_tables[row, position // 4] * 4 + position % 4
            assert all(s != slot or p < position for s, p in seen)
            seen.append((slot, position))
        at = len(piece.sampling)
        for p in piece.parts:
            assert p.count > 0
            for i in range(p.count):
                index = int(part.logit_indices[at + i])
                assert part.positions[index] == p.first + i - 1
                assert part.slots[part.logit_rows[at + i]] == p.scored.sequence.slot
                tokens_scored.append((p.scored.sequence.slot, p.first + i))
            at += p.count
    assert sorted(ran) == sorted(metadata.kv_slots.tolist())
    assert sorted(sampled) == list(range(len(metadata.logit_rows)))
    assert tokens_scored == [
        (slot, position)
        for slot, (length, count, first, asks) in enumerate(wanted)
        for position in range(max(first, 1), min(min(count, length) + 1, length))
        if asks
    ]
