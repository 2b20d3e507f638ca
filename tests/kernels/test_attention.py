"""Paged attention against float64: small shapes with every check, chosen so that all pairs of settings meet."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from executor_svc.kernels.attention import AttentionShape
from executor_svc.kernels.table import HEAD_DIMS
from tests.kernels.backends import make_launcher
from tests.kernels.batches import TOLERANCE, attend, make_batch, max_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# (past, new tokens) of each row. Lengths at 0, 1 and at the borders of blocks, tiles and splits; skewed.
LENGTHS = {
    "decode": ([0, 1, 15, 16, 63, 330], [1] * 6),
    "skewed": ([1500, 2, 0], [1, 1, 1]),
    "drafts": ([31, 64, 0], [3, 2, 1]),
    "prompts": ([0, 0, 0], [1, 17, 70]),
    "chunks": ([16, 65, 200], [33, 64, 5]),
    "mixed": ([90, 0, 47], [1, 40, 130]),
}
ALL_LENGTHS = ([330, 0, 1, 16, 31, 0, 65], [1, 1, 1, 1, 3, 17, 20])
SETTINGS: dict[str, list[Any]] = {
    "dtype": [BF16, F16, F32],
    "head_dim": list(HEAD_DIMS),
    "group": [1, 2, 4, 5, 8, 16],
    "block_size": [16, 24, 64],
    "window": [0, 1, 40],
    "softcap": [0.0, 2.0],
    "lengths": list(LENGTHS),
}


def covering(settings: dict[str, list]) -> list[dict]:
    """Few rows in which every pair of values of every two settings stands together (greedy, fixed order)."""
    names = list(settings)
    index = {name: range(len(values)) for name, values in settings.items()}
    wanted = {(a, i, b, j) for a, b in itertools.combinations(names, 2) for i in index[a] for j in index[b]}
    rows = []
    while wanted:
        a, i, b, j = min(wanted)
        row = {a: i, b: j}
        for name in names:
            if name not in row:
                row[name] = max(index[name], key=functools.partial(_gain, row, name, wanted, names))
        for a, b in itertools.combinations(names, 2):
            wanted.discard((a, row[a], b, row[b]))
        rows.append({name: settings[name][value] for name, value in row.items()})
    return rows


def _gain(row: dict, name: str, wanted: set, names: list[str], value: int) -> int:
    gain = 0
    for other, chosen in row.items():
        first, second = sorted(((other, chosen), (name, value)), key=lambda pair: names.index(pair[0]))
        gain += (*first, *second) in wanted
    return gain


CASES = covering(SETTINGS)


def _identify(case: dict) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case.values())


def run_case(case: dict, seed: int, check_races: bool = True) -> float:
    """-> the largest error"""
    kv_heads = 1 if case["group"] > 4 else 2
    shape = AttentionShape(
        case["dtype"], case["group"] * kv_heads, kv_heads, case["head_dim"], case["block_size"],
        case["head_dim"] ** -0.5, case["window"], case["softcap"],
    )  # fmt: skip
    past, lens = ALL_LENGTHS if case["lengths"] == "all" else LENGTHS[case["lengths"]]
    batch = make_batch(shape, past, lens, seed)
    return max_error(batch, attend(make_launcher(check_races), batch))


@pytest.mark.nvrtc
@pytest.mark.parametrize("case", CASES, ids=_identify)
def test_pairwise(case: dict) -> None:
    assert run_case(case, seed=CASES.index(case)) < TOLERANCE[case["dtype"]]


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("dtype", SETTINGS["dtype"], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", range(1, 17))
def test_every_specialisation(dtype: torch.dtype, head_dim: int, group: int) -> None:
    """All of decode, drafts, prompts and chunks in one batch; plain, then with window, soft cap and another block."""
    for seed, (block_size, window, softcap) in enumerate(((16, 0, 0.0), (24, 40, 2.0))):
        case = {
            "dtype": dtype, "head_dim": head_dim, "group": group, "block_size": block_size, "window": window,
            "softcap": softcap, "lengths": "all",
        }  # fmt: skip
        assert run_case(case, seed) < TOLERANCE[dtype], (window, softcap)


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("lens", [[1, 1], [30, 1]])
def test_blocks_beyond_31_bits(dtype: torch.dtype, lens: list[int]) -> None:
    """Block ids whose element offsets need 33 bits. The cache's untouched pages cost no memory."""
    shape = AttentionShape(dtype, 2, 1, 128, 16, 128**-0.5)
    batch = make_batch(shape, [40, 3], lens, first_block=(1 << 32) // (128 * 16))
    assert max_error(batch, attend(make_launcher(), batch)) < TOLERANCE[dtype]


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_empty_rows_are_zero(dtype: torch.dtype) -> None:
    """A padded row of a graph has a query and no KV position: its output is zeros, and nothing is read."""
    shape = AttentionShape(dtype, 4, 2, 64, 16, 0.125)
    batch = make_batch(shape, [20, -1, 5], [1, 1, 1])
    out = attend(make_launcher(), batch)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    batch.past[1], batch.keys[1] = 0, torch.zeros(1, 2, 64, dtype=dtype)
    batch.values[1] = torch.zeros(1, 2, 64, dtype=dtype)
    assert max_error(batch, out) < TOLERANCE[dtype]


@pytest.mark.nvrtc
def test_large_scores() -> None:
    """The softmax does not overflow, and one key takes all the weight."""
    shape = AttentionShape(BF16, 4, 1, 64, 16, 50.0)
    batch = make_batch(shape, [200, 10], [1, 40])
    assert max_error(batch, attend(make_launcher(), batch)) < 4 * TOLERANCE[BF16]


def test_shapes_are_refused_by_name() -> None:
    for arguments, message in (
        ((torch.float64, 4, 2, 64, 16), "no dtype"),
        ((BF16, 4, 2, 72, 16), "head size 72"),
        ((BF16, 4, 3, 64, 16), "4 query heads over 3"),
        ((BF16, 34, 2, 64, 16), "groups of 1 to 16"),
        ((BF16, 4, 2, 64, 8), "block size 8"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionShape(*arguments, scale=1.0)
