"""A simulated executor over the real link, with the real core behind the real shell."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.bare_worker import BareWorker
from executor_svc.simulate import EOS, Simulated, SimulatedExecutor, parse
from executor_svc.simulate_model import StepTimes, StepTimesError, key, next_tokens, parse_step_times
from protos import front, step
from scheduler_svc.core import record_file
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.core import Core
from scheduler_svc.core.loop import Shell, steady_clock
from scheduler_svc.core.recording import RecordingCore
from scheduler_svc.replay_executor import rerun

LIMITS = step.Limits(256, 16, 32, 512)
MODEL = Simulated(vocab=1000, context=512, eos_every=50)


def expected(seed: int, most: int) -> list[int]:
    keys = np.full(most, key(seed, 0), dtype=np.uint64)
    tokens = next_tokens(keys, np.arange(most, dtype=np.int32), MODEL.vocab, EOS, MODEL.eos_every).tolist()
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


class Service:
    """The shell in a thread."""

    def __init__(self, core: Core, directory: Path) -> None:
        self.front = f"ipc://{directory}/front"
        self.shell = Shell(core, "tcp://127.0.0.1:0", self.front, None, None)
        self.thread = threading.Thread(target=self.shell.run, args=(steady_clock(),), daemon=True)
        self.thread.start()

    def close(self) -> None:
        if not self.thread.is_alive():
            return
        self.shell.stop()
        self.thread.join(20)
        self.shell.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(RecordingCore(CoreConfig(), steady_clock()(), tmp_path / "record"), tmp_path)
    yield running
    running.close()


def start(scheduler: str, times: StepTimes) -> tuple[SimulatedExecutor, threading.Thread]:
    executor = SimulatedExecutor(MODEL, LIMITS, times, scheduler, "simulated-0")
    thread = threading.Thread(target=executor.run, daemon=True)
    thread.start()
    return executor, thread


def test_it_serves_and_its_record_plays_to_another(service: Service, tmp_path: Path) -> None:
    executor, thread = start(service.shell.listening, StepTimes(0.001, 0.0, 0.0, jitter=0.3))
    with BareWorker(service.front) as worker:
        worker.wait_for_model(MODEL.name)
        for seed in range(24):
            worker.submit(seed, MODEL.name, list(range(1, 20 + seed)), 60, seed)
        worker.run_until_ended(24)
        assert all(worker.outputs[seed] == expected(seed, 60) for seed in range(24))
        refused = worker.submit(100, MODEL.name, [1, 2, 3], 5, 0, logprobs=1)
        worker.run_until_ended(25)
        assert isinstance(worker.ends[refused], front.Failed)
    executor.stop()
    thread.join(20)
    assert not thread.is_alive()
    report = executor.report()
    assert report["steps"] > 50
    assert report["busy_seconds"] > 0.0
    service.close()

    _, entries = record_file.read(tmp_path / "record")
    address = f"ipc://{tmp_path}/replay"
    other, thread = start(address, StepTimes(0.0))
    try:
        assert rerun(entries, address, "", wait=20.0) == 0
    finally:
        other.stop()
        other.stop()
        thread.join(20)
    _, entries = record_file.read(tmp_path / "record")
    assert rerun(entries, address, "nobody", wait=1.0) == 2


def test_an_executor_whose_tokens_differ_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    service = Service(RecordingCore(CoreConfig(), steady_clock()(), path), tmp_path)
    executor, thread = start(service.shell.listening, StepTimes(0.0))
    with BareWorker(service.front) as worker:
        worker.wait_for_model(MODEL.name)
        worker.submit(1, MODEL.name, [1, 2, 3], 10, seed=5)
        worker.run_until_ended(1)
    executor.stop()
    thread.join(20)
    service.close()
    monkeypatch.setattr("executor_svc.simulate.key", lambda seed, choice: key(seed + 1, choice))
    _, entries = record_file.read(path)
    address = f"ipc://{tmp_path}/replay"
    other, thread = start(address, StepTimes(0.0))
    try:
        assert rerun(entries, address, "", wait=20.0) == 1
    finally:
        other.stop()
        other.stop()
        thread.join(20)


def test_tokens_follow_from_seed_choice_and_position() -> None:
    keys = np.array([key(1, 0), key(1, 1), key(2, 0), key(1, 0)], dtype=np.uint64)
    positions = np.array([5, 5, 5, 5], dtype=np.int32)
    tokens = next_tokens(keys, positions, 32000, EOS, 0)
    assert tokens[0] == tokens[3]
    assert len(set(tokens.tolist())) == 3
    many = next_tokens(np.full(50000, key(9, 0), dtype=np.uint64), np.arange(50000, dtype=np.int32), 100, 7, 20)
    assert many.min() == 0
    assert many.max() == 99
    assert 0.04 < (many == 7).mean() < 0.06
    assert 7 not in next_tokens(np.full(9999, key(9, 0), dtype=np.uint64), np.arange(9999, dtype=np.int32), 100, 7, 0)


def test_step_times() -> None:
    times = parse_step_times("5,0.01,0.1", 0.0, 1)
    assert times.draw(100, 50) == pytest.approx(0.011)
    drawn = [parse_step_times("5", 0.2, 1).draw(1, 0) for _ in range(2)]
    assert drawn[0] == drawn[1] != 0.005
    for text in ("", "x", "1,2,3,4", "-1", "nan", "1,inf"):
        with pytest.raises(StepTimesError):
            parse_step_times(text, 0.0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--simulate", "x"],
        ["--simulate", "5", "--max-slots", "0"],
        ["--simulate", "5", "--scheduler", "tcp://127.0.0.1:65537"],
        [],
    ],
)
def test_wrong_options_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*wrong, "--scheduler", "tcp://127.0.0.1:1"])
    assert ended.value.code == 2
