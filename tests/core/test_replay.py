"""A recorded core, run again, says the same bit for bit; and a core that does not is found out."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from scheduler_svc.core import record_file
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.recording import RecordingCore
from scheduler_svc.replay import main, replay
from tests.core.driver import Driver, driver_of


def recorded(seed: int, path: Path, events: int = 500) -> Driver:
    driver = driver_of(seed, record=path)
    for _ in range(events):
        driver.event()
    driver.finish()
    driver.check()
    assert isinstance(driver.world.core, RecordingCore)
    driver.world.core.close()
    return driver


@pytest.mark.parametrize("seed", range(4))
def test_a_run_with_everything_in_it_is_replayed_bit_for_bit(seed: int, tmp_path: Path) -> None:
    driver = recorded(seed, tmp_path / "record")
    header, entries = record_file.read(tmp_path / "record")
    core, counts, difference = replay(header, entries, check_every=50)
    assert difference is None
    assert counts[record_file.TO_EXECUTOR] > 100
    assert core.committer.tokens == driver.world.core.committer.tokens > 100
    assert core.incarnation == 42


def test_the_record_is_for_its_owner_only_and_none_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "record"
    recorded(1, path, 50)
    first = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    recorded(1, path, 60)
    assert path.read_bytes() == first
    assert (tmp_path / "record.1").stat().st_size > len(first)


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = driver_of(1, record=tmp_path / "record")
    for _ in range(100):
        driver.event()
    core = driver.world.core
    assert isinstance(core, RecordingCore)
    assert core._file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, core._file.fileno())
    os.close(full)
    driver.finish()
    driver.check()
    core.close()
    assert [record.message for record in caplog.records].count("the record ends here") == 1
    header, entries = record_file.read(tmp_path / "record")
    _, counts, difference = replay(header, entries)
    assert difference is None
    assert counts


def test_another_policy_shows_at_its_first_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record"
    recorded(2, path)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out.startswith("the same: ")
    monkeypatch.setattr(Pace, "prompt_tokens", lambda self, budget, decode_rows: min(budget, 3))
    assert main([str(path)]) == 1
    assert "differs" in capsys.readouterr().out


def test_a_record_cut_short_is_replayed_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record"
    recorded(3, path, 100)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 3])
    assert main([str(path)]) == 0
    path.write_bytes(b"\x10\0\0\0no record at all")
    assert main([str(path)]) == 2
    assert "not a record" in capsys.readouterr().err
