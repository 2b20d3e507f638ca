"""int8 weights: the same bits on every instruction set and in torch, and a numerics fingerprint of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from executor_svc.backends.cpu.build import make_builder
from executor_svc.backends.cpu.linear import Int8Linear
from executor_svc.backends.cpu.quantize import group_size, quantize_groups
from executor_svc.models.load import load_model
from executor_svc.models.rope import rope_table

SHAPES = [(192, 1536), (320, 576), (40, 16), (48, 96), (16, 4096)]  # (N, K); 40 columns do not fill their panels
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
    block, quantize_row = gemm_int8.make_block_int8(method), make_quantize_row(method)

    @numba.njit(nogil=True)
    def run(rows, panels, x, k, group, w, panel, y, quantized, stride):  # type: ignore[no-untyped-def]
        for row in range(rows):
            quantize_row(x + row * k * 4, quantized + row * stride, k, group)
        block(rows, panels, quantized, stride, w, panel, k, group, y, panels * 64)

    packs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if id(weight) not in packs:
            packs[id(weight)] = weight, gemm_int8.pack_panels_int8(weight, method)
        packed = packs[id(weight)][1]
        rows, k = x.shape
        group = group_size(k)
        stride = gemm_int8.row_bytes(k, group, method.x_bytes)
        assert stride <= 3 * k
        y = torch.full((rows, 16 * len(packed)), torch.nan)
        quantized = torch.zeros(rows, stride, dtype=torch.uint8)
        x_at, w_at, y_at, quantized_at = (t.data_ptr() for t in (x, packed, y, quantized))
        run(rows, len(packed), x_at, k, group, w_at, packed.shape[1], y_at, quantized_at, stride)
        return y

    return product


def numpy_quantize(x: Floats) -> tuple[npt.NDArray[np.int32], Floats]:
    grouped = x.reshape(len(x), -1, group_size(x.shape[1]))
    largest = np.abs(grouped).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    return np.rint(grouped * inverse).astype(np.int32), (largest / np.float32(127))[..., 0]


def expected(x: torch.Tensor, weight: torch.Tensor) -> Floats:
    """int32 sums of each group in numpy, then the chain of scales and sums in float32."""
    qx, sx = numpy_quantize(x.numpy())
    qw, sw = numpy_quantize(weight.numpy())
    y = np.zeros((len(x), len(weight)), np.float32)
    for group in range(qx.shape[1]):
        sums = qx[:, group] @ qw[:, group].T
        y += sums.astype(np.float32) * sw[:, group] * sx[:, group, None]
    return y


def example(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and weights whose largest sums are as large as any can be."""
    generator = torch.Generator().manual_seed(n + k)
    x = torch.randn(130, k, generator=generator) * torch.logspace(-3, 3, 130)[:, None]
    weight = torch.randn(n, k, generator=generator) * 0.05
    x[3], x[4], x[5] = 0.0, 2.5, -2.5
    weight[0], weight[1], weight[2] = 0.03, -0.03, 0.0
    return x, weight


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_instruction_set_gives_the_same_bits_for_any_number_of_rows(n: int, k: int) -> None:
    x, weight = example(n, k)
    wanted = expected(x, weight)
    for name in methods():
        product = compiled(name)
        for rows in ROWS:
            got = product(x[:rows], weight).numpy()
            assert np.array_equal(got[:, :n], wanted[:rows]), f"{name}, {rows} rows"
            assert not got[:, n:].any(), f"{name}: a missing column is not zero"


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_torch_gives_the_same_bits(n: int, k: int) -> None:
    x, weight = example(n, k)
    wanted = expected(x, weight)
    linear = Int8Linear(weight)
    for rows in (1, 2, 17, 130):
        assert np.array_equal(linear(x[:rows]).numpy(), wanted[:rows]), f"{rows} rows"


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


def test_groups_too_small_to_scale_are_zeros() -> None:
    x, weight = example(40, 16)
    for size in (1e-45, 1e-38, 7e-31):
        x[0] = size
        for y in [compiled(name)(x, weight)[:, :40] for name in methods()] + [Int8Linear(weight)(x)]:
            assert not y[0].any()
            assert bool(y[1].isfinite().all())


@pytest.mark.parametrize(("k", "group"), [(576, 32), (1536, 32), (48, 16), (16, 16)])
def test_quantising_is_within_half_a_step_and_symmetric(k: int, group: int) -> None:
    x = torch.randn(50, k, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_groups(x)
    assert values.shape == (50, k // group, group)
    assert bool((values.abs().amax(dim=2) == 127).all())
    error = (values * scales[..., None]).view(50, k) - x
    assert bool((error.abs().view(values.shape) <= scales[..., None] * 0.5001).all())
    negated, same = quantize_groups(-x)
    assert torch.equal(negated, -values)
    assert torch.equal(same, scales)


def test_a_width_that_is_no_multiple_of_16_is_refused() -> None:
    with pytest.raises(ValueError, match="24 inputs: must be a multiple of 16"):
        Int8Linear(torch.zeros(16, 24))


@pytest.mark.parametrize("attention", ["numba", "torch"])
def test_the_weight_type_is_part_of_the_numerics_fingerprint(tiny: Path, attention: str) -> None:
    """So an executor with int8 weights does not continue what float16 weights began (see the core's routing)."""
    facts = [
        load_model(tiny, weights=weights, attention=attention, threads=1).model.facts for weights in ("float16", "int8")
    ]
    assert facts[0].fingerprint == facts[1].fingerprint
    assert facts[0].numerics != facts[1].numerics


def test_the_kv_type_is_part_of_the_numerics_fingerprint_and_of_the_bytes_of_a_token(tiny: Path) -> None:
    pytest.importorskip("numba")
    loaded = load_model(tiny, weights="int8", threads=1)
    plain = load_model(tiny, weights="int8", threads=1, attention="torch", kv_type="float32").model.facts
    assert 2 * loaded.model.facts.kv_bytes_per_token == plain.kv_bytes_per_token
    assert {tensor.dtype for tensor in loaded.model.kv_tensors()} <= {torch.float16}  # type: ignore[attr-defined]
    rope = rope_table(loaded.config.rope, loaded.config.head_dim, 64)

    def numerics(weights: str, kv_type: str | None) -> str:
        return make_builder(loaded.config, rope, weights, 1, "numba", kv_type=kv_type).numerics()

    assert numerics("int8", None) == numerics("int8", "float16") != numerics("int8", "float32")
    for weights in ("float16", "float32"):
        assert numerics(weights, None) == numerics(weights, "float32") != numerics(weights, "float16")


def test_a_float16_cache_is_refused_where_there_is_none(tiny: Path) -> None:
    with pytest.raises(ValueError, match="KV type 'float16': not with attention 'torch'"):
        load_model(tiny, weights="int8", threads=1, attention="torch", kv_type="float16")
    with pytest.raises(ValueError, match="KV type 'float8': not one of"):
        load_model(tiny, weights="int8", threads=1, kv_type="float8")


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
