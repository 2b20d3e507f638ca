"""What the kernels ask of memory, from the interpreter's counters: the facts that decide their speed."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels.attention import AttentionShape
from executor_svc.kernels.build import SOURCE_DIR
from executor_svc.kernels.elementwise import ElementwiseKernels
from executor_svc.kernels.table import HEAD_DIMS
from tests.kernels.batches import TOLERANCE, attend, make_batch, max_error
from tests.kernels.ptx.launcher import PtxLauncher
from tests.kernels.ptx.stats import SECTOR, Stats

pytestmark = pytest.mark.nvrtc

BF16, F32 = torch.bfloat16, torch.float32
LINE = 32 * 4  # bytes that the banks of shared memory carry in one wavefront


def _assert_least(stats: Stats, products: str) -> None:
    """Every instruction that touches shared memory (the arrival of copies, products, weights, merges) takes the fewest
    wavefronts there are: one for each phase of a warp's request, which is 32 lanes of four bytes, 16 of eight or eight
    of sixteen. Copies and the reads of ``products`` use all lanes, so for them that is their bytes over ``LINE``: four
    wavefronts for a warp's 512 bytes. Copies read as many sectors as their bytes fill."""
    shared = [access for access in stats.accesses.values() if access.space == "shared"]
    assert not [access for access in shared if access.transfers != access.ideal]
    wide = stats.matching("cp.async.cg", "shared") + stats.matching(products, "shared")
    assert not [access for access in wide if access.transfers * LINE != access.bytes]
    loads = stats.matching("cp.async.cg", "global")
    assert not [access for access in loads if access.transfers * SECTOR != access.bytes]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 8])
def test_decode_reads_every_byte_once(head_dim: int, group: int) -> None:
    """Each byte of K and V exactly once for all query heads of its group, in whole sectors, with no bank conflict in
    the main loop nor in the merge of the warps."""
    shape = AttentionShape(BF16, 2 * group, 2, head_dim, 16, head_dim**-0.5)
    batch = make_batch(shape, [640, 33, 15], [1, 1, 1])
    launcher = PtxLauncher(check_races=False, collect=True)
    assert max_error(batch, attend(launcher, batch, target_blocks=8)) < TOLERANCE[BF16]
    stats = launcher.stats[f"paged_decode<bf16, {head_dim}>"]
    tokens = int((batch.past + batch.lens).sum())
    for parameter in (4, 5):  # key_cache, value_cache
        assert stats.loaded[parameter] == tokens * 2 * head_dim * 2
    _assert_least(stats, "ldmatrix")
    stats.matching("v2.f32", "shared")  # the merge was among them


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_has_no_bank_conflicts(head_dim: int) -> None:
    shape = AttentionShape(BF16, 4, 2, head_dim, 16, head_dim**-0.5)
    batch = make_batch(shape, [32], [96])
    launcher = PtxLauncher(check_races=False, collect=True)
    assert max_error(batch, attend(launcher, batch)) < TOLERANCE[BF16]
    _assert_least(launcher.stats[f"paged_prefill<bf16, {head_dim}>"], "ldmatrix")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_float32_has_no_bank_conflicts(head_dim: int) -> None:
    """Decode and a few new tokens in one batch: the same kernel does both."""
    shape = AttentionShape(F32, 2, 1, head_dim, 16, head_dim**-0.5)
    batch = make_batch(shape, [40, 15], [1, 3])
    launcher = PtxLauncher(check_races=False, collect=True)
    assert max_error(batch, attend(launcher, batch)) < TOLERANCE[F32]
    _assert_least(launcher.stats[f"paged_attention_f32<{head_dim}>"], "ld.shared.v4")


@pytest.mark.parametrize(("head_dim", "factor"), [(64, 8), (80, 2), (96, 4)])
def test_rows_without_padding_would_conflict(head_dim: int, factor: int) -> None:
    """The counters see what the padding is for: eight rows at one column meet as few banks as the row allows."""
    source = (SOURCE_DIR / "paged_kv.cuh").read_text()
    overrides = {"paged_kv.cuh": source.replace("(RUN * D + PAD)", "(RUN * D)")}
    assert overrides["paged_kv.cuh"] != source
    shape = AttentionShape(BF16, 1, 1, head_dim, 16, head_dim**-0.5)
    launcher = PtxLauncher(check_races=False, collect=True, overrides=overrides)
    attend(launcher, make_batch(shape, [33], [1]))
    reads = launcher.stats[f"paged_decode<bf16, {head_dim}>"].matching("ldmatrix", "shared")
    assert sum(access.transfers for access in reads) == factor * sum(access.ideal for access in reads)


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
