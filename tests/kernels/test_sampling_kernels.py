"""The sampling kernels: the draw is compared bit for bit, the rest against float64."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from executor_svc.kernels.sampling import (
    STATUS_NO_CANDIDATE,
    STATUS_NON_FINITE,
    STATUS_OK,
    Adjusted,
    DrawRules,
    LogitRules,
    SamplingKernels,
    draw_values,
)
from tests.kernels import references
from tests.kernels.backends import make_launcher

pytestmark = pytest.mark.nvrtc


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _no_rules(rows: int) -> LogitRules:
    none = torch.zeros(0, dtype=torch.int32)
    starts = torch.zeros(rows + 1, dtype=torch.int32)
    penalties = torch.tensor([[1.0, 0.0, 0.0]]).repeat(rows, 1)
    return LogitRules(starts, none, torch.zeros(0), starts, none, none, penalties)


def _empty(logits: torch.Tensor) -> Adjusted:
    rows = len(logits)
    return Adjusted(
        torch.full_like(logits, torch.nan),
        torch.full((rows,), -9),
        torch.full((rows,), torch.nan),
        torch.full((rows,), -9, dtype=torch.int32),
    )


def _draw_rules(*values: np.ndarray) -> DrawRules:
    return DrawRules(*(torch.from_numpy(value) for value in draw_values(*values)))


def _draw(logits: torch.Tensor, rules: DrawRules) -> list[int]:
    kernels, adjusted = SamplingKernels(make_launcher()), _empty(logits)
    kernels.adjust(adjusted, logits, _no_rules(len(logits)))
    tokens, last = torch.full((len(logits),), -9), torch.full((len(logits) + 1,), -9)
    slots = torch.arange(len(logits), dtype=torch.int32) + 1
    slots[0] = -1
    kernels.draw(tokens, last, slots, adjusted, rules)
    assert last.tolist() == [-9, -9, *tokens[1:].tolist()]
    return tokens.tolist()


def test_rules_in_order() -> None:
    vocab = 70
    logits = torch.linspace(-3, 3, vocab).repeat(3, 1)
    mask = torch.full((2, 3), -1, dtype=torch.int32)
    mask[1] = _ints(1 << 3, 0, 1 << 5)  # ids 3 and 69
    rules = LogitRules(
        _ints(0, 2, 2, 3), _ints(69, 1, 69), torch.tensor([-torch.inf, 2.5, -torch.inf]),
        _ints(0, 3, 3, 3), _ints(0, 1, 68), _ints(0, 2, 1),
        torch.tensor([[2.0, 0.25, 0.5], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
        mask, _ints(-1, 0, 1),
    )  # fmt: skip
    adjusted = _empty(logits)
    SamplingKernels(make_launcher()).adjust(adjusted, logits, rules)
    first = logits[0].double().clone()
    first[69], first[1] = -torch.inf, first[1] + 2.5
    for token, count in ((0, 0), (1, 2), (68, 1)):
        value = first[token] / 2 if first[token] > 0 else first[token] * 2
        first[token] = value - 0.25 * count - (0.5 if count else 0)
    third = torch.full((vocab,), -torch.inf, dtype=torch.float64)
    third[3] = logits[2, 3]
    torch.testing.assert_close(adjusted.logits[0].double(), first, atol=1e-6, rtol=1e-6)
    assert torch.equal(adjusted.logits[1], logits[1])
    torch.testing.assert_close(adjusted.logits[2].double(), third, atol=1e-6, rtol=1e-6)
    assert adjusted.argmax.tolist() == [67, 69, 3]
    assert adjusted.top.tolist() == [float(adjusted.logits[r, i]) for r, i in enumerate((67, 69, 3))]
    assert adjusted.status.tolist() == [STATUS_OK] * 3


def test_status_and_ties() -> None:
    vocab = 1030
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0)).clamp(max=2.0)
    logits[0, [5, 700, 1029]] = 3.0  # the lowest id wins
    logits[1, 1029] = torch.nan
    logits[2, 512] = torch.inf
    logits[3] = -torch.inf
    logits[4, :500] = -torch.inf
    logits[5, 3] = -torch.nan
    adjusted = _empty(logits)
    SamplingKernels(make_launcher()).adjust(adjusted, logits, _no_rules(6))
    bad = STATUS_NON_FINITE
    assert adjusted.status.tolist() == [STATUS_OK, bad, bad, STATUS_NO_CANDIDATE, STATUS_OK, bad]
    assert adjusted.argmax.tolist() == [5, 0, 0, 0, int(logits[4].argmax()), 0]


def test_rules_that_go_out_of_bounds_are_a_fault() -> None:
    """A penalty below 1 makes a large logit infinite; a mask hides it again."""
    logits = torch.full((2, 40), 1.0)
    logits[:, 7] = 3e38
    none, ids, counts = torch.zeros(1, dtype=torch.int32), _ints(7, 7), _ints(0, 0)
    mask = torch.full((1, 2), -1, dtype=torch.int32)
    mask[0, 0] ^= 1 << 7
    rules = LogitRules(
        _ints(0, 0, 0), none, torch.zeros(1), _ints(0, 1, 2), ids, counts,
        torch.tensor([[0.01, 0.0, 0.0], [0.01, 0.0, 0.0]]), mask, _ints(-1, 0),
    )  # fmt: skip
    adjusted = Adjusted(logits, *(getattr(_empty(logits), name) for name in ("argmax", "top", "status")))
    SamplingKernels(make_launcher()).adjust(adjusted, logits, rules)  # in place
    assert adjusted.status.tolist() == [STATUS_NON_FINITE, STATUS_OK]
    assert adjusted.argmax.tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_draw_is_exact(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, vocab = 7, 900
    logits = (random.standard_normal((rows, vocab)) * 4).astype(np.float32)
    logits[1, :300] = logits[1, 0]  # many equal weights: ties go by id
    logits[2] = 0.0
    logits[3, random.permutation(vocab)[: vocab - 2]] = -np.inf
    temperature = np.array([0.7, 1.0, 1.0, 0.3, 2.0, 0.0, 0.05])
    top_k = np.array([0, 5, 40, 3, 1, 0, 0])
    top_p = np.array([1.0, 1.0, 0.37, 0.9, 0.5, 1.0, 0.95])
    min_p = np.array([0.0, 0.02, 0.0, 0.0, 0.0, 0.0, 0.1])
    bits = random.integers(0, 2**64, rows, dtype=np.uint64)
    bits[4] = 2**64 - 1
    tokens = _draw(torch.from_numpy(logits), _draw_rules(temperature, top_k, top_p, min_p, bits))
    for row in range(rows):
        if temperature[row] == 0:
            expected = int(logits[row].argmax())
        else:
            expected = references.draw(
                logits[row], temperature[row], int(top_k[row]), top_p[row], min_p[row], int(bits[row])
            )
        assert tokens[row] == expected, row


@pytest.mark.skipif(
    importlib.util.find_spec("executor_svc.sampling.draw") is None or importlib.util.find_spec("numba") is None,
    reason="needs the CPU's draw",
)
def test_draw_equals_the_cpu() -> None:
    from executor_svc.sampling.draw import draw_rows

    random = np.random.default_rng(9)
    rows, vocab = 8, 3000
    logits = (random.standard_normal((rows, vocab)) * 3).astype(np.float32)
    temperature, top_k = random.uniform(0.2, 1.5, rows), random.integers(0, 60, rows)
    top_p, min_p = random.uniform(0.3, 1.0, rows), random.uniform(0, 0.05, rows)
    bits = random.integers(0, 2**64, rows, dtype=np.uint64)
    tokens = _draw(torch.from_numpy(logits), _draw_rules(temperature, top_k, top_p, min_p, bits))
    expected = draw_rows(logits, np.arange(rows), logits.max(axis=1), temperature, top_k, top_p, min_p, bits)
    assert tokens == expected.tolist()


def test_logprobs() -> None:
    vocab, limit = 1200, 6
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(3)) * 5
    logits[1, [10, 20, 1100]] = 30.0
    logits[2, 100:] = -torch.inf
    tokens, num_top = torch.tensor([4, 20, 7, 0]), _ints(6, 3, 0, -1)
    chosen, ranks = torch.full((4,), torch.nan), torch.full((4,), -9, dtype=torch.int32)
    top_ids, top = torch.full((4, limit), -9), torch.full((4, limit), torch.nan)
    SamplingKernels(make_launcher()).logprobs(chosen, ranks, top_ids, top, logits, tokens, num_top)
    expected = logits.double().log_softmax(dim=1)
    order = [sorted(range(vocab), key=lambda i: (-float(logits[r, i]), i)) for r in range(4)]
    for row in range(3):
        assert abs(float(chosen[row]) - float(expected[row, tokens[row]])) < 2e-5
        assert ranks[row] == order[row].index(int(tokens[row])) + 1
        n = int(num_top[row])
        assert top_ids[row].tolist() == order[row][:n] + [-9] * (limit - n)
        torch.testing.assert_close(top[row, :n].double(), expected[row, order[row][:n]], atol=2e-5, rtol=0)
    assert chosen[3].isnan()
    assert ranks[3] == -9
    assert (top_ids[3] == -9).all()
