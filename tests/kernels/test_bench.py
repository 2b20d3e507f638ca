"""What of the kernel benchmark can be checked without a device."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import decode, gpu_check, kernels
from bench.kernels import Workload, decode_workloads, prefill_workloads
from tests.kernels.backends import make_device
from tests.kernels.ptx.launcher import PtxLauncher
from tests.kernels.tiny_models import LLAMA


def test_workloads_count_what_they_say() -> None:
    work = Workload("two rows", (10, 0), (1, 3), 2)
    assert work.kv_bytes == (11 + 3) * 8 * 128 * 2 * 2
    assert work.flops == 2 * 2 * 8 * 2 * 128 * (11 + 1 + 2 + 3)
    for work in decode_workloads():
        megabytes = int(work.name.split()[1])
        assert abs(work.kv_bytes / (megabytes << 20) - 1) < 0.05, work.name
        assert set(work.new) == {1}
    assert all(work.group == 4 for work in prefill_workloads())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
@pytest.mark.parametrize(
    ("main", "status", "line"),
    [
        (kernels.main, "bench.kernels: no CUDA device", ""),
        (decode.main, 2, "bench.decode: no usable NVIDIA GPU here (torch sees none)\n"),
        (gpu_check.main, 2, "gpu-check: no usable NVIDIA GPU here (torch sees none)\n"),
    ],
)
def test_one_line_without_a_device(
    main: Callable[[], int], status: int | str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit) as caught:
        sys.exit(main())
    assert caught.value.code == status  # a text is printed by the interpreter
    assert capsys.readouterr() == ("", line)


@pytest.mark.nvrtc
@pytest.mark.parametrize(("past", "new", "group"), [(31, 1, 2), (0, 20, 1), (16, 18, 1)])
def test_torch_computes_the_same_on_the_same_data(past: int, new: int, group: int) -> None:
    """What stands beside our kernels in the benchmark, over the pages laid out contiguously."""
    work = Workload("tiny", (past,) * 2, (new,) * 2, group)
    case = kernels.PagedCase(PtxLauncher(check_races=False), work)
    case.run()
    attention = kernels.torch_attention(case, work)
    assert attention is not None
    assert case.error(attention()) < 0.02
    case._values.neg_()
    assert case.error(kernels.torch_attention(case, work)()) > 1  # type: ignore[misc]


def test_what_torch_cannot_batch_is_left_out() -> None:
    work = Workload("skewed", (3, 40), (1, 1), 1)
    assert kernels.torch_attention(kernels.PagedCase(PtxLauncher(), work), work) is None
    names = [work.name for work in (*decode_workloads(), *prefill_workloads())]
    assert {work.name for work in kernels.flex_workloads()} <= set(names)
    assert len(kernels.flex_workloads()) == 12, "each is compiled, for seconds"


def test_results_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With clocks for the device's: another library's failure costs its own figures alone."""
    monkeypatch.setattr(kernels, "FLUSH_BYTES", 16)
    monkeypatch.setattr(torch, "empty", lambda *size, device="", **kw: torch.zeros(*size, **kw))
    monkeypatch.setattr(kernels, "median_seconds", lambda run, seconds, flush=None: 1e-3)
    monkeypatch.setattr(kernels, "PagedCase", lambda launcher, work: SimpleNamespace(run=int, error=lambda other: 0.25))
    monkeypatch.setattr(kernels, "torch_attention", lambda case, work: lambda: 1)

    def fail(case: Any, work: Any) -> Any:
        raise RuntimeError("no compiler\nhere")

    fail.__name__ = "flex_attention"
    monkeypatch.setattr(kernels, "flex_attention", fail)
    figures = {"stream_bytes_per_s": 4e12, "product_flops": 8e14}
    bench = kernels.Bench(None, 0.1, figures, str(tmp_path / "out.json"))  # type: ignore[arg-type]
    work = next(decode_workloads())
    bench.measure(work)
    bench.measure_flex(work)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["stream_bytes_per_s"] == 4e12
    (row,) = found["results"]
    assert row["share"] == pytest.approx(work.kv_bytes / 1e-3 / 4e12)
    assert (row["torch_difference"], row["flex_microseconds"]) == (0.25, None)
    assert "sdpa" in bench.results[work.name].line()


class _HostTimer:
    def mark(self) -> float:
        return time.perf_counter()

    def microseconds(self, first: float, second: float) -> float:
        return (second - first) * 1e6


@pytest.mark.nvrtc
def test_the_decode_bench_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in: its figures mean nothing, its code is what a device will run."""
    monkeypatch.setattr(decode, "WARM_UP", 1)
    model = decode.random_model(dataclasses.replace(LLAMA, num_layers=1), make_device(), "bfloat16")
    for graphs in (True, False):
        result = decode.measure(model, 2, 15, 3, graphs, 1e9, _HostTimer())
        assert (result.batch, result.graphs) == (2, graphs)
        assert result.step_us > 0
        assert result.gap_us_p99 >= result.gap_us_p50 >= 0
    shape = (64, 4 * 64 + 2 * 2 * 64, 4 * 64 * 64, 3 * 96 * 64)  # norms, q k v, output, MLP
    expected = 2 * (2 * 64 + shape[1] * 64 + shape[2] + shape[3] + 96 * 64) + 2 * 100 * model.facts.kv_bytes_per_token
    assert decode.step_bytes(model.config, model.facts, 2, 100) == expected


def test_gpu_check_has_every_part(tmp_path: Path) -> None:
    names = [name for name, _ in gpu_check.parts(tmp_path)]
    assert names[0] == "kernel tests on the device"
    assert {"memcheck", "racecheck", "both services", "kernels, measured", "decode steps, measured"} <= set(names)
    for _, command in gpu_check.parts(tmp_path):
        for word in command or []:
            assert not word.startswith("tests/") or Path(word.split("::")[0]).exists(), word


def test_a_sanitizer_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not gpu_check.run("memcheck", None)
    assert "memcheck: no compute-sanitizer here" in capsys.readouterr().out
