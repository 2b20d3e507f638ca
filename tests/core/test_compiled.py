"""The compiled core is the same core: what one recorded, the other says again bit for bit, and its invariants hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.compile_core import COMPILED, ROOT, compile_core, has_compiler
from tests.core.test_replay import recorded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_compiler(), reason="no C compiler"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build") / "compiled"
    compile_core(folder)
    return folder


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_module_that_was_to_be_compiled_is(compiled: Path) -> None:
    names = ", ".join(f"scheduler_svc.core.{name} as {name}_" for name in COMPILED)
    files = run(compiled, "-c", f"import {names}\nprint({', '.join(f'{name}_.__file__' for name in COMPILED)})").split()
    assert len(files) == len(COMPILED)
    assert all(file.startswith(str(compiled)) and file.endswith(".so") for file in files)


@pytest.mark.parametrize("seed", range(3))
def test_it_says_what_the_interpreted_core_said(seed: int, compiled: Path, tmp_path: Path) -> None:
    recorded(seed, tmp_path / "record")
    assert "same" in run(compiled, "-m", "scheduler_svc.replay", str(tmp_path / "record"))


def test_its_invariants_hold_after_every_event(compiled: Path) -> None:
    assert '"worlds"' in run(compiled, "-m", "tests.core.campaign", "--events", "10000", "--seed", "9000")
