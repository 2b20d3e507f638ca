"""The kernels between the matrix products, against float64."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels.elementwise import ElementwiseKernels
from tests.kernels import references
from tests.kernels.backends import make_launcher

pytestmark = pytest.mark.nvrtc

TYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-6}  # relative, of values near 1


def _randn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).abs() / (1 + expected.abs())
    assert float(error.nan_to_num(nan=torch.inf).max()) < TOLERANCE[actual.dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "hidden", "offset"), [(1, 8, 0.0), (3, 2056, 1.0)])
def test_norm(dtype: torch.dtype, tokens: int, hidden: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(hidden)
    residual, delta = (_randn(generator, dtype, tokens, hidden) for _ in range(2))
    weight = _randn(generator, dtype, hidden)
    kernels = ElementwiseKernels(make_launcher(), dtype)
    before, out = residual.clone(), torch.full_like(residual, torch.nan)
    kernels.add_rms_norm(out, residual, None, weight, 1e-5, offset)
    assert torch.equal(residual, before)
    _close(out, references.rms_norm(before, weight, 1e-5, offset))
    kernels.add_rms_norm(out, residual, delta, weight, 1e-5, offset)
    assert torch.equal(residual, before + delta)
    _close(out, references.rms_norm(residual, weight, 1e-5, offset))


@pytest.mark.parametrize("dtype", TYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up = _randn(generator, dtype, 3, 2 * 2072) * 4
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0  # exp overflows
    out = torch.full((3, 2072), torch.nan, dtype=dtype)
    ElementwiseKernels(make_launcher(), dtype).silu_mul(out, gate_up)
    gate, up = gate_up.double().chunk(2, dim=1)
    _close(out, gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rotary", "block_size", "normed"),
    [
        (torch.bfloat16, 64, 64, 16, False),
        (torch.float16, 80, 80, 24, True),
        (torch.float32, 96, 96, 16, True),
        (torch.bfloat16, 128, 64, 17, True),
        (torch.float32, 256, 256, 32, False),
        (torch.float32, 80, 20, 16, True),
    ],
)
def test_rope_and_cache(dtype: torch.dtype, head_dim: int, rotary: int, block_size: int, normed: bool) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    q_heads, kv_heads, blocks, tokens = 6, 2, 4, 5
    qkv = _randn(generator, dtype, tokens, (q_heads + 2 * kv_heads) * head_dim)
    caches = [torch.full((blocks, kv_heads, block_size, head_dim), torch.nan, dtype=dtype) for _ in "kv"]
    rope = torch.randn(50, rotary, generator=generator)
    positions = torch.tensor([0, 49, 7, 8, 21])
    slots = torch.tensor([block_size, 0, 4 * block_size - 1, -1, block_size - 1])
    norms = [_randn(generator, dtype, head_dim) for _ in "qk"] if normed else [None, None]
    before = qkv.clone()
    ElementwiseKernels(make_launcher(), dtype).rotate_and_cache(
        qkv, caches[0], caches[1], rope, positions, slots, q_norm=norms[0], k_norm=norms[1], eps=1e-6, weight_offset=0.5
    )
    heads = before.view(tokens, -1, head_dim)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    q64, k64 = (
        references.rotate(x if norm is None else references.rms_norm(x, norm, 1e-6, 0.5), rope[positions])
        for x, norm in ((q, norms[0]), (k, norms[1]))
    )
    real = slots >= 0
    _close(qkv.view(tokens, -1, head_dim)[real][:, :q_heads], q64[real])
    assert torch.equal(qkv[~real], before[~real])  # padding is left alone
    assert torch.equal(qkv.view(tokens, -1, head_dim)[:, q_heads:], heads[:, q_heads:])
    written = torch.zeros(blocks, block_size, dtype=torch.bool)
    for token in torch.nonzero(real).flatten().tolist():
        block, at = divmod(int(slots[token]), block_size)
        written[block, at] = True
        _close(caches[0][block, :, at], k64[token])
        assert torch.equal(caches[1][block, :, at], v[token])
    for cache in caches:
        assert cache.transpose(1, 2)[~written].isnan().all()


def test_cache_write_beyond_31_bits() -> None:
    """A slot whose element offset does not fit 31 bits (nor 32). The cache's untouched pages cost no memory."""
    head_dim, block_size, block = 128, 16, (1 << 32) // (128 * 16) + 3
    shape = (block + 1, 1, block_size, head_dim)
    caches = [torch.empty(shape, dtype=torch.bfloat16) for _ in "kv"]
    qkv = _randn(torch.Generator().manual_seed(2), torch.bfloat16, 1, 3 * head_dim)
    rope = torch.cat([torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)], dim=1)
    ElementwiseKernels(make_launcher(), torch.bfloat16).rotate_and_cache(
        qkv, caches[0], caches[1], rope, torch.tensor([0]), torch.tensor([block * block_size + 5])
    )
    assert torch.equal(caches[0][block, 0, 5], qkv[0, head_dim : 2 * head_dim])
    assert torch.equal(caches[1][block, 0, 5], qkv[0, 2 * head_dim :])


def test_gather_ids() -> None:
    ids = torch.tensor([5, -1, 7, -1, -1])
    kernels = ElementwiseKernels(make_launcher(), torch.float32)
    kernels.gather_ids(ids, torch.tensor([100, 101, 102]), torch.tensor([0, 2, 9, 0, 1], dtype=torch.int32))
    assert ids.tolist() == [5, 102, 7, 100, 101]


def test_refused_by_name() -> None:
    kernels = ElementwiseKernels(make_launcher(), torch.bfloat16)
    x = torch.zeros(1, 12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="hidden size 12 is not a multiple of 8"):
        kernels.add_rms_norm(x, x.clone(), None, x[0], 1e-5)
    with pytest.raises(ValueError, match="intermediate size 12"):
        kernels.silu_mul(x, torch.zeros(1, 24, dtype=torch.bfloat16))
