"""The device against the interpreter, on the same inputs: only with ``--kernels gpu``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from executor_svc.kernels.attention import AttentionShape
from executor_svc.kernels.elementwise import ElementwiseKernels
from executor_svc.kernels.launch import CupyLauncher, Launcher
from executor_svc.kernels.sampling import Adjusted, DrawRules, LogitRules, SamplingKernels, draw_values
from executor_svc.kernels.table import all_kernels
from tests.kernels import backends
from tests.kernels.batches import TOLERANCE, attend, make_batch
from tests.kernels.ptx.launcher import PtxLauncher
from tests.kernels.test_experts import TOLERANCE as EXPERT_TOLERANCE
from tests.kernels.test_experts import make_case

pytestmark = pytest.mark.nvrtc


@pytest.fixture(autouse=True)
def _needs_a_device() -> Iterator[None]:
    if not backends.on_device():
        pytest.skip("compares a device with the interpreter: --kernels gpu")
    yield
    torch.cuda.synchronize()


def both() -> tuple[Launcher, Launcher]:
    return backends.MirrorLauncher(CupyLauncher()), PtxLauncher(check_races=False)


@pytest.mark.parametrize("name", all_kernels())
def test_every_kernel_loads(name: str) -> None:
    """ptxas' image is accepted by the driver, with the shared memory that it asks for."""
    CupyLauncher().kernel(name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention(dtype: torch.dtype, head_dim: int) -> None:
    """Tensor cores add in an order of their own: results are close, and no row is missing."""
    shape = AttentionShape(dtype, 8, 2, head_dim, 16, head_dim**-0.5)
    batch = make_batch(shape, [330, 0, 40], [1, 20, 3])
    device, interpreter = (attend(launcher, batch).double() for launcher in both())
    scale = interpreter.abs().amax(dim=-1, keepdim=True).clamp(min=1e-3)
    assert float(((device - interpreter).abs() / scale).max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_elementwise(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, delta, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((3, 512), (3, 512), (512,)))
    found = []
    for launcher in both():
        kernels, residual = ElementwiseKernels(launcher, dtype), x.clone()
        normed, gated = torch.empty_like(x), torch.empty(3, 256, dtype=dtype)
        kernels.add_rms_norm(normed, residual, delta, weight, 1e-5)
        kernels.silu_mul(gated, x)
        found.append((residual, normed, gated))
    assert torch.equal(found[0][0], found[1][0])
    for device, interpreter in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(device, interpreter)


@pytest.mark.parametrize("tokens", [5, 40, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_experts(dtype: torch.dtype, tokens: int) -> None:
    """Every tile of the grouped products. The sort may order an expert's pairs otherwise; nothing depends on it."""
    case = make_case(tokens, dtype, 392, 200)
    (device, to), (interpreter, right) = (case.run(launcher) for launcher in both())
    assert torch.equal(to.ids, right.ids)
    assert torch.equal(to.tiles, right.tiles)
    torch.testing.assert_close(to.weights, right.weights)
    scale = interpreter.double().abs().amax(dim=1, keepdim=True)
    error = float(((device.double() - interpreter.double()).abs() / scale).max())
    assert error < EXPERT_TOLERANCE[dtype]


def test_draws_are_the_same_bits() -> None:
    random = np.random.default_rng(4)
    rows, vocab = 16, 5000
    logits = torch.from_numpy((random.standard_normal((rows, vocab)) * 3).astype(np.float32))
    values = draw_values(
        random.uniform(0, 1.5, rows).round(1), random.integers(0, 50, rows), random.uniform(0.3, 1, rows),
        random.uniform(0, 0.05, rows), random.integers(0, 2**64, rows, dtype=np.uint64),
    )  # fmt: skip
    none, starts = torch.zeros(1, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.int32)
    penalties = torch.tensor([[1.0, 0.0, 0.0]]).repeat(rows, 1)
    rules = LogitRules(starts, none, torch.zeros(1), starts, none, none, penalties)
    found = []
    for launcher in both():
        kernels = SamplingKernels(launcher)
        adjusted = Adjusted(
            torch.empty_like(logits), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows),
            torch.zeros(rows, dtype=torch.int32),
        )  # fmt: skip
        tokens, last = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
        kernels.adjust(adjusted, logits, rules)
        slots = torch.arange(rows, dtype=torch.int32)
        kernels.draw(tokens, last, slots, adjusted, DrawRules(*(torch.from_numpy(v) for v in values)))
        found.append((tokens, last, adjusted.argmax, adjusted.status))
    for device, interpreter in zip(*found, strict=True):
        assert torch.equal(device, interpreter)
