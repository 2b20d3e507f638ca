"""int8 weights: exact sums on every instruction set, the same in torch, and a numerics fingerprint of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor_svc.backends.cpu import linear as torch_linear
from executor_svc.backends.cpu.linear import Int8Linear, int8_products
from executor_svc.backends.cpu.quantize import quantize_rows
from executor_svc.models.load import load_model

SHAPES = [(576, 1536), (960, 576), (40, 16), (16, 4096)]  # (N, K); 40 columns do not fill their panels
ROWS = [*range(1, 15), 25, 96, 130]
Floats = npt.NDArray[np.float32]

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def methods() -> list[str]:
    """Those of ``gemm_int8`` that this machine can run."""
    pytest.importorskip("numba")
    import llvmlite.binding as llvm

    has = llvm.get_host_cpu_features().get
    out = ["PLAIN"]
    if has("avx2"):
        out.append("MADD")
    if has("avxvnni") or (has("avx512vnni") and has("avx512vl")):
        out.append("VNNI_256")
    if has("avx512vnni") and has("avx512bw"):
        out.append("VNNI_512")
    return out


@cache
def compiled(name: str) -> Product:
    """``product(x, weight)`` -> float32 [M, N rounded up to 16], as the compiled forward computes it."""
    import numba

    from executor_svc.backends.cpu.native import gemm_int8
    from executor_svc.backends.cpu.native.quantize import make_quantize_row

    method = getattr(gemm_int8, name)
    block, quantize_row, x_bytes = gemm_int8.make_block_int8(method), make_quantize_row(method), method.x_bytes

    @numba.njit(nogil=True)
    def run(rows, panels, x, k, w, panel, y, quantized, scales):  # type: ignore[no-untyped-def]
        for row in range(rows):
            quantize_row(x + row * k * 4, quantized + row * k * x_bytes, scales + row * 4, k // 16)
        block(rows, panels, quantized, k * x_bytes, w, panel, k, y, panels * 64, scales)

    packs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if id(weight) not in packs:
            packs[id(weight)] = weight, gemm_int8.pack_panels_int8(weight, method)
        packed = packs[id(weight)][1]
        rows, k = x.shape
        y = torch.full((rows, 16 * len(packed)), torch.nan)
        quantized, scales = torch.zeros(rows, k, dtype=torch.int16), torch.zeros(rows)
        addresses = (t.data_ptr() for t in (x, packed, y, quantized, scales))
        x_at, w_at, y_at, quantized_at, scales_at = addresses
        run(rows, len(packed), x_at, k, w_at, packed.shape[1], y_at, quantized_at, scales_at)
        return y

    return product


def numpy_quantize(x: Floats) -> tuple[npt.NDArray[np.int32], Floats]:
    largest = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    return np.rint(x * inverse).astype(np.int32), (largest / np.float32(127))[:, 0]


def expected(x: torch.Tensor, weight: torch.Tensor) -> Floats:
    """int32 sums in numpy, then the two scales in float32."""
    qx, sx = numpy_quantize(x.numpy())
    qw, sw = numpy_quantize(weight.numpy())
    return (qx @ qw.T).astype(np.float32) * sw * sx[:, None]


def example(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and weights whose largest sums are as large as any can be."""
    generator = torch.Generator().manual_seed(n + k)
    x = torch.randn(130, k, generator=generator) * torch.logspace(-3, 3, 130)[:, None]
    weight = torch.randn(n, k, generator=generator) * 0.05
    x[3], x[4], x[5] = 0.0, 2.5, -2.5
    weight[0], weight[1], weight[2] = 0.03, -0.03, 0.0
    return x, weight


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_instruction_set_gives_the_exact_sums_for_any_number_of_rows(n: int, k: int) -> None:
    x, weight = example(n, k)
    wanted = expected(x, weight)
    for name in methods():
        product = compiled(name)
        for rows in ROWS:
            got = product(x[:rows], weight).numpy()
            assert np.array_equal(got[:, :n], wanted[:rows]), f"{name}, {rows} rows"
            assert not got[:, n:].any(), f"{name}: a missing column is not zero"


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_torch_gives_the_same_bits_with_and_without_its_int8_product(
    n: int, k: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exact and not torch_linear._int_mm_is_exact():
        pytest.skip("torch's int8 product saturates on this CPU")
    monkeypatch.setattr(torch_linear, "_int_mm_is_exact", lambda: exact)
    x, weight = example(n, k)
    wanted = expected(x, weight)
    linear = Int8Linear(weight)
    for rows in (1, 2, 17, 130):
        assert np.array_equal(linear(x[:rows]).numpy(), wanted[:rows]), f"{rows} rows"


def test_torch_sums_the_largest_products_exactly() -> None:
    x = torch.full((20, 5000), 127, dtype=torch.int8)
    weight = torch.full((32, 5000), -127, dtype=torch.int8)
    assert bool((int8_products(x, weight) == -127 * 127 * 5000).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_nan_and_harms_no_other(bad: float) -> None:
    x, weight = example(40, 16)
    x = x[:9].contiguous()
    wanted = expected(x, weight)
    x[4, 7] = bad
    others = [row for row in range(9) if row != 4]
    outputs = [compiled(name)(x, weight)[:, :40] for name in methods()] + [Int8Linear(weight)(x)]
    for y in outputs:
        assert bool(y[4].isnan().all())
        assert np.array_equal(y[others].numpy(), wanted[others])


def test_rows_too_small_to_scale_are_zeros() -> None:
    x, weight = example(40, 16)
    for size in (1e-45, 1e-38, 7e-31):
        x[0] = size
        for y in [compiled(name)(x, weight)[:, :40] for name in methods()] + [Int8Linear(weight)(x)]:
            assert not y[0].any()
            assert bool(y[1].isfinite().all())


def test_quantising_is_within_half_a_step_and_symmetric() -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_rows(x)
    assert int(values.abs().max()) == 127
    assert bool(((values * scales[:, None] - x).abs() <= scales[:, None] * 0.5001).all())
    negated, same = quantize_rows(-x)
    assert torch.equal(negated, -values)
    assert torch.equal(same, scales)


@pytest.mark.parametrize(("k", "words"), [(24, "multiple of 16"), (66_320, "at most")])
def test_inputs_that_int8_sums_cannot_hold_are_refused(k: int, words: str) -> None:
    pytest.importorskip("numba")
    from executor_svc.backends.cpu.native.gemm_int8 import PLAIN, pack_panels_int8

    with pytest.raises(ValueError, match=words):
        pack_panels_int8(torch.zeros(16, k), PLAIN)


@pytest.mark.parametrize("attention", ["numba", "torch"])
def test_the_weight_type_is_part_of_the_numerics_fingerprint(tiny: Path, attention: str) -> None:
    """So an executor with int8 weights does not continue what float16 weights began (see the core's routing)."""
    facts = [
        load_model(tiny, weights=weights, attention=attention, threads=1).model.facts for weights in ("float16", "int8")
    ]
    assert facts[0].fingerprint == facts[1].fingerprint
    assert facts[0].numerics != facts[1].numerics


def test_int8_stays_near_float32(tiny: Path, load: Any) -> None:
    """Whole models: compiled and torch, against float32 (random weights quantise worse than trained ones)."""
    from tests.executor.model.batch import Sequence, run

    ids = torch.randint(3, 384, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    logits = {}
    for weights, attention in (("float32", "numba"), ("int8", "numba"), ("int8", "torch")):
        logits[weights, attention] = run(load(tiny, weights, attention), [(Sequence(ids, [0, 1, 2, 3]), 60)], 16)
    exact = logits.pop(("float32", "numba"))
    for name, got in logits.items():
        error = (got - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.05, f"{name}: relative error {error:.4f}"
