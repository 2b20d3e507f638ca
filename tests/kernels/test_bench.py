"""What of the kernel benchmark can be checked without a device."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import build_kernels, decode, experts, gpu_check, kernels
from bench.kernels import Workload, decode_workloads, prefill_workloads
from executor_svc.backends.cuda import device
from executor_svc.kernels.table import all_kernels
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
        (kernels.main, 2, "bench.kernels: no usable NVIDIA GPU here (torch sees none)\n"),
        (experts.main, 2, "bench.experts: no usable NVIDIA GPU here (torch sees none)\n"),
        (decode.main, 2, "bench.decode: no usable NVIDIA GPU here (torch sees none)\n"),
        (gpu_check.main, 2, "gpu-check: no usable NVIDIA GPU here (torch sees none)\n"),
    ],
)
def test_one_line_without_a_device(
    main: Callable[[], int], status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit) as caught:
        sys.exit(main())
    assert caught.value.code == status
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
        assert result.gap_us_p99 >= result.gap_us_p50 >= result.copy_us_p50 >= 0
    shape = (64, 4 * 64 + 2 * 2 * 64, 4 * 64 * 64, 3 * 96 * 64)  # norms, q k v, output, MLP
    expected = 2 * (2 * 64 + shape[1] * 64 + shape[2] + shape[3] + 96 * 64) + 2 * 100 * model.facts.kv_bytes_per_token
    assert decode.step_bytes(model.config, model.facts, 2, 100) == expected


def test_gpu_check_runs_what_exists(tmp_path: Path) -> None:
    found = gpu_check.stages(tmp_path)
    names = [stage.name for stage in found]
    assert (names[0], names[-2:]) == ("build", ["memcheck", "racecheck"])
    assert {"tests", "services", "kernels", "decode"} < set(names)
    for stage in found:
        assert gpu_check.missing(stage.needs) == [], "what it needs is what is installed here"
        for word in stage.command:
            assert not word.startswith("tests/") or Path(word).exists(), word
            if word.startswith("bench."):
                assert importlib.util.find_spec(word), word
    assert sum(stage.seconds for stage in found[:3]) < gpu_check.SECONDS


def test_gpu_check_has_every_test_that_runs_on_a_device() -> None:
    """Whatever takes its launcher or device from backends.py; what has only the interpreter is of no use there."""
    on_device = {
        path.stem.removeprefix("test_")
        for path in Path(__file__).parent.glob("test_*.py")
        if re.search(r"from tests\.kernels\.backends import .*make_", path.read_text())
    }
    assert set(gpu_check.DEVICE_TESTS) == on_device - {"bench"} | {"device"}


def test_sanitizers_look_at_every_kernel_of_ours(tmp_path: Path) -> None:
    command = gpu_check.sanitizer("memcheck", tmp_path / "report")
    filters = [word.removeprefix("kernel_substring=") for word in command if word.startswith("kernel_substring=")]
    for name in all_kernels():
        symbol_part = name.split("<")[0]
        assert symbol_part in filters


def _stage(code: str, **options: Any) -> gpu_check.Stage:
    sizes: dict[str, Any] = {"seconds": 60.0, "needs": []} | options
    return gpu_check.Stage("some", command=[sys.executable, "-c", code], **sizes)


def test_a_stage_says_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = gpu_check.run(_stage("print('one'); print('two')"), 60)
    assert (good.state, good.status, good.tail) == ("passed", 0, ["one", "two"])
    bad = gpu_check.run(_stage("raise SystemExit(3)"), 60)
    assert (bad.state, bad.why) == ("failed", "exit status 3")
    report = tmp_path / "report"
    report.write_text("========= Invalid read\n========= ERROR SUMMARY: 1 error\n")
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: "there")
    found = gpu_check.run(_stage("raise SystemExit(9)", report=report), 60)
    assert (found.state, found.why) == ("failed", "the sanitizer found something; ERROR SUMMARY: 1 error")


def test_a_stage_that_runs_too_long_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "child"
    os.mkfifo(said)
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(said)!r}, 'w').write(str(child.pid))\ntime.sleep(600)"
    )
    children = []
    wait = subprocess.Popen.wait

    def over(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        children.append(os.pidfd_open(int(said.read_text())))  # its time is over once it has started something
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", over)
    late = gpu_check.run(_stage(code), 60)
    assert late.state == "timed out"
    assert "STAGE=some" in late.why
    assert select.select(children, [], [], 30)[0], "it runs on"
    os.close(children[0])


def test_what_is_not_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    for options, left, why in (
        ({"needs": ["json", "no_such_module", "no.such"]}, 60, "it needs no_such_module, no.such"),
        ({"report": tmp_path / "report"}, 60, "no compute-sanitizer here"),
        ({}, 5, "no time is left for it; alone: make gpu-check STAGE=some"),
    ):
        outcome = gpu_check.run(_stage("", **options), left)
        assert outcome.state == "not run"
        assert outcome.why.startswith(why)


def test_every_stage_runs_and_its_state_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Whatever one of them did before."""
    chosen = [_stage(code) for code in ("raise SystemExit(1)", "")]
    chosen = [dataclasses.replace(stage, name=name) for stage, name in zip(chosen, ("first", "second"), strict=True)]
    monkeypatch.setattr(gpu_check, "stages", lambda out: chosen)
    monkeypatch.setattr(device, "open_device", lambda: SimpleNamespace(description=lambda: "a device"))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "out")])
    assert gpu_check.main() == 1
    kept = json.loads((tmp_path / "out" / "check.json").read_text())
    assert [(stage["stage"], stage["state"]) for stage in kept["stages"]] == [("first", "failed"), ("second", "passed")]
    assert kept["device"] == "a device"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--stage", "second", "--out", str(tmp_path / "out")])
    assert gpu_check.main() == 0
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--stage", "third"])
    with pytest.raises(SystemExit):
        gpu_check.main()
    assert "third: not one of first, second" in capsys.readouterr().err


@pytest.mark.nvrtc
def test_kernels_are_built_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = tmp_path / "built.json"
    arguments = ["--arch", "sm_90a", "--only", "silu", "--jobs", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["build_kernels", *arguments])
    assert build_kernels.main() == 0
    assert "3 of 3 kernels for sm_90a" in capsys.readouterr().out
    assert all(row["registers"] > 0 and not row["spill_bytes"] for row in json.loads(out.read_text()))
