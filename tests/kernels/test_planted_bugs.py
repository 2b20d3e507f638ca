"""Bugs planted in the kernels' own source are found, by the check or the comparison that should find them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from executor_svc.kernels.attention import AttentionShape
from executor_svc.kernels.elementwise import ElementwiseKernels
from tests.kernels import planting
from tests.kernels.batches import TOLERANCE, attend, make_batch, max_error
from tests.kernels.planting import IN_FLIGHT, WRONG, assert_found, plant
from tests.kernels.ptx.errors import PtxError
from tests.kernels.ptx.launcher import PtxLauncher

pytestmark = pytest.mark.nvrtc

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Bug(planting.Bug):
    prefill: bool = False
    first_block: int = 0
    window: int = 300


BUGS = [
    Bug("no warp barrier before a tile is read", "paged_decode.cu", "__syncwarp();", ";", IN_FLIGHT),
    Bug(
        "no barrier before the merge", "paged_decode.cu",
        "cp_async_wait<0>();\n  __syncthreads();", "cp_async_wait<0>();", "data race in shared",
    ),
    Bug("no barrier in the merge", "paged_decode.cu", "  __syncthreads();\n  for (int i", "  for (int i", IN_FLIGHT),
    Bug("a wait one group short", "paged_decode.cu", "wait<S::STAGES - 2>", "wait<S::STAGES - 1>", IN_FLIGHT),
    Bug("a wait too short for the queries", "paged_decode.cu", "wait<S::STAGES - 1>", "wait<S::STAGES>", IN_FLIGHT),
    Bug("a wait one group short in float32", "paged_attention_f32.cu", "wait<1>", "wait<2>", IN_FLIGHT, F32),
    Bug(
        "pages of the tile before", "paged_decode.cu", "rows_of(tile + S::STAGES * WARPS)",
        "rows_of(tile + (S::STAGES - 1) * WARPS)", WRONG, window=0,
    ),
    Bug(
        "pages of the tile before, in prefill", "paged_prefill.cu", "rows_of(tile + 1)", "rows_of(tile)", WRONG,
        prefill=True,
    ),
    Bug(
        "keys overwritten too early", "paged_prefill.cu",
        "    __syncthreads();  // the values are here", "    //", IN_FLIGHT, prefill=True,
    ),
    Bug(
        "values overwritten too early", "paged_prefill.cu",
        "    __syncthreads();  // the keys are here", "    //", IN_FLIGHT, prefill=True,
    ),
    Bug(
        "no wait for the values", "paged_prefill.cu", "    cp_async_wait<0>();\n    __syncthreads();  // the values",
        "    __syncthreads();  // the values", "before it is written", prefill=True,
    ),
    Bug(
        "no commit", "common.cuh", 'asm volatile("cp.async.commit_group;" ::: "memory");', "",
        "before it is written", prefill=True,
    ),
    Bug("rows past the end are read", "paged_kv.cuh", "from < 0 ? 0 : 16);", "16);", WRONG),
    Bug("a row too many", "paged_kv.cuh", "position < end ? pages", "position <= end ? pages", WRONG),
    Bug(
        "query rows too many", "paged_kv.cuh", "q + (r < rows ? at : 0), r < rows ? 16 : 0", "q + at, 16",
        "global access out of bounds",
    ),
    Bug(
        "offsets of 32 bits", "paged_kv.cuh", "(int64_t)from * D + c", "from * D + c", "out of bounds|wrong",
        first_block=(1 << 32) // (64 * 16),
    ),
    Bug("swapped operands a1 and a2", "common.cuh", '"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])', WRONG),
    Bug("swapped operands b0 and b1", "common.cuh", '"r"(b0), "r"(b1)', '"r"(b1), "r"(b0)', WRONG, prefill=True),
    Bug("values not transposed", "common.cuh", "x4.trans.shared", "x4.shared", WRONG),
    Bug("pairs packed the wrong way round", "common.cuh", '"f"(high), "f"(low)', '"f"(low), "f"(high)', WRONG),
    Bug("the future is seen", "paged_kv.cuh", "min(item.kv_end, position + 1)", "item.kv_end", WRONG, prefill=True),
    Bug(
        "a window one short", "paged_kv.cuh", "position - window + 1 : 0", "position - window + 2 : 0", WRONG, window=20
    ),
    Bug(
        "tiles taken for wholly visible", "attention_tile.cuh", "first + KV <= Visible", "first <= Visible", WRONG,
        prefill=True,
    ),
    Bug("no rescaling", "attention_tile.cuh", "out[n][half * 2] *= correction;", ";", WRONG),
    Bug("a merge without weights", "paged_merge.cu", "x.x += w * part.x", "x.x += part.x", WRONG),
    Bug("weights not handed over", "paged_attention_f32.cu", "__syncwarp();", "", "data race in shared", F32),
    Bug(
        "a stage overwritten too early", "paged_attention_f32.cu", "    __syncthreads();  // all have left", "    //",
        IN_FLIGHT, F32, prefill=True,
    ),
    Bug(
        "a shuffle under divergence", "paged_attention_f32.cu", "warp_max(score)", "(seen ? warp_max(score) : score)",
        "member mask|wrong", F32, prefill=True,
    ),
]  # fmt: skip


def _attention_error(overrides: dict[str, str], bug: Bug) -> float:
    """A batch in which every part of the kernels works: several tiles, splits, a window, last blocks half full."""
    shape = AttentionShape(bug.dtype, 2, 1, 64, 16, 0.125, bug.window)
    past, lens = ([70, 300], [90, 40]) if bug.prefill else ([600, 37], [1, 1])
    batch = make_batch(shape, past, lens, seed=3, first_block=bug.first_block)
    return max_error(batch, attend(PtxLauncher(overrides=overrides), batch, target_blocks=6))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_attention(bug: Bug) -> None:
    assert_found(bug, lambda overrides: _attention_error(overrides, bug), TOLERANCE[bug.dtype])


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_the_same_batch_without_a_bug(dtype: torch.dtype, prefill: bool) -> None:
    bug = Bug("none", "", "", "", "", dtype, prefill)
    assert _attention_error({}, bug) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("file", "text", "replacement", "found"),
    [
        ("common.cuh", "  __syncthreads();\n  float total", "  float total", "data race|before it is written"),
        ("rms_norm.cu", "int64_t row = (int64_t)blockIdx.x", "int64_t row = 1 + (int64_t)blockIdx.x", "misaligned"),
        ("rms_norm.cu", "store_vector(out + row + i, x);", "store_vector(out + i, x);", "data race in global"),
        ("rms_norm.cu", "i < hidden", "i <= hidden", "out of bounds"),
    ],
)  # fmt: skip
def test_norm(file: str, text: str, replacement: str, found: str) -> None:
    kernels = ElementwiseKernels(PtxLauncher(overrides=plant(file, text, replacement)), BF16)
    x = torch.ones(3, 2048, dtype=BF16)
    with pytest.raises(PtxError, match=found):
        kernels.add_rms_norm(torch.empty_like(x), x, x.clone(), x[0].clone(), 1e-5)
