"""The build function, the signature check and the launch interface."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.kernels import build as building
from executor_svc.kernels import nvrtc
from executor_svc.kernels.build import arch_of, build
from executor_svc.kernels.launch import checked_symbol
from executor_svc.kernels.signature import LaunchError, check_arguments, check_symbol, demangle, parse_parameter
from executor_svc.kernels.table import all_kernels, find_kernel
from tests.kernels.backends import MirrorLauncher
from tests.kernels.ptx.launcher import PtxLauncher

KERNEL = "silu_mul<bf16>"


@pytest.mark.nvrtc
def test_cache(tmp_path: Path) -> None:
    first = build("silu_mul.cu", [KERNEL], "sm_90a", cache=tmp_path)
    again = build("silu_mul.cu", [KERNEL], "sm_90a", cache=tmp_path)
    assert not first.cached
    assert again.cached
    assert (again.data, again.log, again.lowered) == (first.data, first.log, first.lowered)
    assert first.data.startswith(b"\x7fELF")
    assert "Used" in first.log
    assert not build("silu_mul.cu", [KERNEL], "sm_80", cache=tmp_path).cached
    ptx = build("silu_mul.cu", [KERNEL], "compute_80", cache=tmp_path)
    assert ptx.is_ptx
    assert b".target sm_80" in ptx.data
    header = (building.SOURCE_DIR / "common.cuh").read_text() + "\n"
    assert not build("silu_mul.cu", [KERNEL], "sm_90a", cache=tmp_path, overrides={"common.cuh": header}).cached
    assert len(list(tmp_path.iterdir())) == 4  # no temporary file is left


@pytest.mark.nvrtc
def test_damaged_and_unwritable_cache(tmp_path: Path) -> None:
    image = build("silu_mul.cu", [KERNEL], "sm_90a", cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", b"{}\n", whole[:-1], whole[:-1] + b"\xff", b"[1]\n", whole.replace(b"sha256", b"sha257", 1)):
        entry.write_bytes(damaged)
        again = build("silu_mul.cu", [KERNEL], "sm_90a", cache=tmp_path)
        assert not again.cached
        assert again.data == image.data
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert build("silu_mul.cu", [KERNEL], "sm_90a", cache=blocked).data == image.data


@pytest.mark.nvrtc
def test_errors_are_reported(tmp_path: Path) -> None:
    with pytest.raises(nvrtc.NvrtcError, match=r"silu_mul.cu\(\d+\): error: identifier \"x\""):
        build("silu_mul.cu", [KERNEL], "sm_90a", cache=tmp_path, overrides={"silu_mul.cu": "\n\nint nonsense = x;"})
    with pytest.raises(ValueError, match="architecture 'gfx90'"):
        build("silu_mul.cu", [KERNEL], "gfx90", cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(nvrtc.NvrtcUnavailable, match=r"nvidia-cuda-nvrtc==13\.0"):
        nvrtc._library_path()


def test_architectures() -> None:
    assert [arch_of(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"7\.5"):
        arch_of((7, 5))


def test_sources_stand_alone() -> None:
    """No system header, and inline assembly in common.cuh only."""
    for path in building.SOURCE_DIR.glob("*.cu*"):
        text = path.read_text()
        assert not re.search(r"#include\s*<", text), path.name
        assert path.name == "common.cuh" or not re.search(r"\basm\b", text), path.name


def test_table() -> None:
    names = all_kernels()
    assert len(names) == len(set(names))
    assert {find_kernel(name).source for name in names} == {path.name for path in building.SOURCE_DIR.glob("*.cu")}
    for name in ("paged_decode<bf16, 72>", "paged_decode", "nothing", "gather_ids<bf16>", "paged_decode<f32, 64>"):
        with pytest.raises(KeyError):
            find_kernel(name)


@pytest.mark.nvrtc
@pytest.mark.parametrize("source", sorted({find_kernel(name).source for name in all_kernels()}))
def test_declarations_match_the_compiled_kernels(source: str) -> None:
    """One specialisation of each element type: the others differ in constants only."""
    names = [name for name in all_kernels() if find_kernel(name).source == source]
    chosen = {re.sub(r"\d+>", ">", name): name for name in names}
    for name in chosen.values():
        checked_symbol(find_kernel(name), build(source, [name], "compute_90"))


def test_signatures() -> None:
    symbol = "_Z1kPfPK13__nv_bfloat16PKifixPh"
    assert demangle(symbol) == "k(float*, __nv_bfloat16 const*, int const*, float, int, long long, unsigned char*)"
    with pytest.raises(LaunchError, match="not a mangled"):
        demangle("plain")
    declared = [parse_parameter(text, {"T": "f32"}) for text in ("T*", "const i32*?", "f32", "i64")]
    check_symbol("k", declared, "_Z1kPfPKifx")
    for wrong in ("_Z1kPfPifx", "_Z1kPfPKifi", "_Z1kPfPKif", "_Z1kPdPKifx"):
        with pytest.raises(LaunchError, match="k: declared"):
            check_symbol("k", declared, wrong)
    for text in ("q16*", "const i32", "i32?", "f64"):
        with pytest.raises(ValueError, match="is not supported"):
            parse_parameter(text, {})


def test_arguments() -> None:
    declared = [parse_parameter(text, {}) for text in ("f32*", "const i32*?", "f32", "i64")]
    good = (torch.zeros(4), torch.zeros(2, dtype=torch.int32), np.float32(1), np.int64(2))
    check_arguments("k", declared, good, "cpu")
    check_arguments("k", declared, (good[0], None, good[2], good[3]), "cpu")
    for index, wrong, message in (
        (0, None, "must not be null"),
        (0, torch.zeros(4, dtype=torch.float64), "argument 0 .float.. is torch.float64"),
        (0, torch.zeros(4, 4).T[1:], "not contiguous"),
        (0, np.float32(1), "must be a tensor"),
        (2, 1.0, "must be a numpy scalar"),
        (2, np.float64(1), "is float64"),
        (3, 2, "must be a numpy scalar"),
        (3, np.int32(2), "is int32"),
        (3, torch.zeros(1, dtype=torch.int64), "must be a numpy scalar"),
    ):
        with pytest.raises(LaunchError, match=message):
            check_arguments("k", declared, [*good[:index], wrong, *good[index + 1 :]], "cpu")  # type: ignore[list-item]
    with pytest.raises(LaunchError, match="3 arguments for 4"):
        check_arguments("k", declared, good[:3], "cpu")
    with pytest.raises(LaunchError, match="is on cpu, the kernel runs on cuda"):
        check_arguments("k", declared, good, "cuda")


@pytest.mark.nvrtc
def test_launch_shape_is_checked() -> None:
    launch = PtxLauncher().kernel("gather_ids")
    args = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    good = (*args, np.int32(1))
    launch((1,), (128,), good)
    for grid, block, smem, message in (
        ((1,), (64,), 0, "64 threads a block, declared 128"),
        ((0,), (128,), 0, "grid"),
        ((1,), (128,), 16, "16 bytes of shared memory"),
        ((1, 1, 1, 1), (128,), 0, "grid"),
        ((1, 65536), (128,), 0, "grid"),
    ):
        with pytest.raises(LaunchError, match=message):
            launch(grid, block, good, smem)


@pytest.mark.nvrtc
def test_mirrored_launches() -> None:
    """The launcher of the device tests, over the interpreter: host tensors get what the kernel wrote to its copies."""
    ids, last, slots = torch.tensor([-1, 4]), torch.tensor([7]), torch.zeros(2, dtype=torch.int32)
    MirrorLauncher(PtxLauncher()).kernel("gather_ids")((1,), (128,), (ids, last, slots, np.int32(2)))
    assert ids.tolist() == [7, 4]
