"""What the kernels ask of memory, from the interpreter's counters: the facts that decide their speed."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels.attention import AttentionShape
from executor_svc.kernels.elementwise import ElementwiseKernels
from executor_svc.kernels.table import HEAD_DIMS
from tests.kernels.batches import TOLERANCE, attend, make_batch, max_error
from tests.kernels.ptx.launcher import PtxLauncher
from tests.kernels.ptx.stats import Access, Stats

pytestmark = pytest.mark.nvrtc

BF16 = torch.bfloat16
# Bank accesses of the copies' arrival over the least possible. Rows of 10 or 12 vectors, padded by one: where eight
# neighbouring lanes cross a row's end, two of them meet one bank. Three groups of five do so, and one of three.
ARRIVALS = {80: 1.6, 96: 4 / 3}


def _matching(stats: Stats, text: str) -> list[Access]:
    found = [access for access in stats.accesses.values() if text in access.where]
    assert found, text
    return found


def _total_factor(accesses: list[Access]) -> float:
    return sum(access.transfers for access in accesses) / sum(access.ideal for access in accesses)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 8])
def test_decode_reads_every_byte_once(head_dim: int, group: int) -> None:
    """Each byte of K and V exactly once for all query heads of its group, in whole sectors, with no bank conflict in
    the main loop."""
    shape = AttentionShape(BF16, 2 * group, 2, head_dim, 16, head_dim**-0.5)
    batch = make_batch(shape, [640, 33, 15], [1, 1, 1])
    launcher = PtxLauncher(check_races=False, collect=True)
    assert max_error(batch, attend(launcher, batch, target_blocks=8)) < TOLERANCE[BF16]
    stats = launcher.stats[f"paged_decode<bf16, {head_dim}>"]
    tokens = int((batch.past + batch.lens).sum())
    for parameter in (4, 5):  # key_cache, value_cache
        assert stats.loaded[parameter] == tokens * 2 * head_dim * 2
    copies = _matching(stats, "cp.async.cg")
    loads = [access for access in copies if access.space == "global"]
    assert _total_factor(loads) == 1.0
    assert _total_factor(_matching(stats, "ldmatrix")) == 1.0
    arrivals = _total_factor([access for access in copies if access.space == "shared"])
    assert arrivals == pytest.approx(ARRIVALS.get(head_dim, 1.0))
    merge = [access for access in stats.accesses.values() if access.space == "shared" and "v2.f32" in access.where]
    assert _total_factor(merge) < 1.1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_has_no_bank_conflicts(head_dim: int) -> None:
    shape = AttentionShape(BF16, 4, 2, head_dim, 16, head_dim**-0.5)
    batch = make_batch(shape, [32], [96])
    launcher = PtxLauncher(check_races=False, collect=True)
    assert max_error(batch, attend(launcher, batch)) < TOLERANCE[BF16]
    stats = launcher.stats[f"paged_prefill<bf16, {head_dim}>"]
    assert _total_factor(_matching(stats, "ldmatrix")) == 1.0
    copies = _matching(stats, "cp.async.cg")
    assert _total_factor([access for access in copies if access.space == "global"]) == 1.0
    arrivals = _total_factor([access for access in copies if access.space == "shared"])
    assert arrivals == pytest.approx(ARRIVALS.get(head_dim, 1.0))


def test_elementwise_kernels_are_coalesced() -> None:
    launcher = PtxLauncher(collect=True)
    kernels = ElementwiseKernels(launcher, BF16)
    x = torch.ones(2, 2048, dtype=BF16)
    kernels.add_rms_norm(torch.empty_like(x), x, x.clone(), x[0].clone(), 1e-5)
    kernels.silu_mul(torch.empty(2, 1024, dtype=BF16), x)
    for stats in launcher.stats.values():
        wide = [access for access in stats.accesses.values() if access.space == "global"]
        assert wide
        assert all(access.factor == 1.0 for access in wide)
