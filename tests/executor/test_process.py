"""``python -m executor_svc`` as a process, and its options."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from executor_svc import logs
from executor_svc.__main__ import main
from executor_svc.config import parse_args
from executor_svc.kv_memory import KvMemoryError, free_memory, num_blocks, parse_size
from executor_svc.link_security import InsecureLink, link_keys
from executor_svc.models.null import NullModel
from protos.step import Drain, Draining, Goodbye, StepResult
from tests.executor.scripted import ScriptedCore

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(*args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "executor_svc", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=90)


def test_a_process_serves_drains_on_sigterm_and_exits_0(start: Start) -> None:
    with ScriptedCore() as core:
        process = start("--model", "null:97", "--scheduler", core.address, "--kv-blocks", "64", "--log-format", "json")
        planner = core.welcome()
        core.send(planner.plan(admitted=[planner.admission(0, [5, 6], [1])], prefill=[(0, 2)]))
        core.expect(StepResult)
        process.send_signal(signal.SIGTERM)
        core.expect(Draining)
        core.send(planner.plan(decode=[0]))
        assert core.expect(StepResult).seq == 2
        core.send(Drain())
        core.expect(Goodbye)
        out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (0, "")
    assert '"event": "executor ready"' in err
    assert '"event": "executor left"' in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *args: None)
    args = ["executor", "--model", "null:97", "--scheduler", "tcp://127.0.0.1:1", "--device", "cuda"]
    monkeypatch.setattr(sys, "argv", args)
    assert main() == 2
    assert capsys.readouterr().err.splitlines() == [
        "executor: --device cuda: no usable NVIDIA GPU here (torch sees none); use --device cpu"
    ]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--scheduler", "127.0.0.1:1"], "--scheduler 127.0.0.1:1: must be tcp://HOST:PORT"),
        (["--scheduler", "tcp://127.0.0.1:65537"], "with a port of at most 65535"),
        (["--scheduler", "tcp://127.0.0.1:*"], "--scheduler tcp://127.0.0.1:*: must be tcp://HOST:PORT"),
        (["--scheduler", "tcp://10.0.0.1:1"], "--link-secret-file"),
        (["--model", "null:2"], "vocabulary of 3"),
        (["--model", "/no/such/model"], "no such file"),
        (["--kv-memory", "many"], "no size"),
        (["--kv-memory", "1GiB", "--kv-blocks", "3"], "not allowed with"),
        (["--block-size", "0"], "outside 1..1024"),
        (["--link-secret-file", "/no/such/secret"], "No such file"),
        (["--weights", "bfloat16"], "only with --device cuda"),
        (["--weights", "int8", "--device", "cuda"], "only with --device cpu"),
        (["--kv-type", "float16", "--device", "cuda"], "--kv-type float16: only with --device cpu"),
        (["--kv-type", "float16", "--attention", "torch"], "--kv-type float16: not with --attention torch"),
        (["--device", "cuda", "--block-size", "8"], "--block-size 8: at least 16"),
        (["--gpu-memory-fraction", "1.5"], "at most 1"),
    ],
)
def test_options_are_refused_by_name(args: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--model", "null:97", "--scheduler", "tcp://127.0.0.1:1", *args])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_defaults_follow_the_device() -> None:
    base = ["--model", "null:97", "--scheduler", "tcp://127.0.0.1:1"]
    assert not parse_args(base).overlap
    assert parse_args([*base, "--device", "cuda"]).overlap
    assert parse_args([*base, "--overlap"]).overlap
    assert [parse_args([*base, "--device", each]).weights for each in ("cpu", "cuda")] == ["float16", "bfloat16"]


def test_off_loopback_needs_a_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    for host in ("127.0.0.9", "[::1]", "localhost"):
        assert link_keys(f"tcp://{host}:1", None) is None
    for host in ("10.0.0.1", "scheduler", "*", "[fe80::1]"):
        with pytest.raises(InsecureLink):
            link_keys(f"tcp://{host}:1", None)
    assert link_keys("tcp://scheduler:1", tmp_path / "secret") is not None


def test_kv_blocks_from_memory() -> None:
    facts = NullModel(97, context_length=1000).facts  # one byte a token
    assert parse_size("1GiB") == 2**30
    assert parse_size("1.5kb") == 1500
    assert parse_size("7") == 7
    assert num_blocks(facts, 16, 4, kv_memory=1600, kv_blocks=None, free=0) == 100
    assert num_blocks(facts, 16, 4, kv_memory=None, kv_blocks=7, free=0) == 7
    assert num_blocks(facts, 16, 4, kv_memory=None, kv_blocks=None, free=1000) == 25
    assert num_blocks(facts, 16, 4, kv_memory=None, kv_blocks=None, free=10**9) == 4 * 63  # no more than can be used
    with pytest.raises(KvMemoryError, match="--kv-memory 15 bytes"):
        num_blocks(facts, 16, 4, kv_memory=15, kv_blocks=None, free=10**9)
    with pytest.raises(KvMemoryError, match="--kv-blocks"):
        num_blocks(facts, 16, 4, kv_memory=None, kv_blocks=None, free=20)
    assert free_memory() > 0
