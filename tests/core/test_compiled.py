"""The compiled core is the same core: what one recorded, the other says again bit for bit, and tests hold for it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.compile_core import COMPILED, ROOT, compile_core, environment, has_compiler
from tests.core.test_replay import recorded

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_compiler(), reason="no C compiler"),
]
# They put something in the place of the core's code, which compiled code does not see (or refuses).
PLANTING = (
    "compiled",
    "fleet",
    "planted_bugs",
    "policy_properties",
    "replay",
    "step_age",
    "tenants",
    "trials",
    "turns",
)
SERVICES = ("same_tokens", "failover", "operators", "schedulers")  # of tests/e2e: real processes


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build") / "compiled"
    compile_core(folder)
    return folder


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment(folder), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests(folder: Path, *files: Path) -> str:
    options = ["--import-mode=append", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    return run(folder, "-m", "pytest", *options, *map(str, files))


def test_every_module_that_was_to_be_compiled_is(compiled: Path) -> None:
    names = ", ".join(f"scheduler_svc.core.{name} as {name}_" for name in COMPILED)
    files = run(compiled, "-c", f"import {names}\nprint({', '.join(f'{name}_.__file__' for name in COMPILED)})").split()
    assert len(files) == len(COMPILED)
    assert all(file.startswith(str(compiled)) and file.endswith(".so") for file in files)


@pytest.mark.parametrize("name", COMPILED)
def test_no_function_is_defined_in_another(name: str) -> None:
    """Compiled, it would be a cycle at every call, and the cycle collector is off (garbage.py)."""
    tree = ast.parse((ROOT / "scheduler_svc" / "core" / f"{name}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inner = [
        node.name for f in functions for node in ast.walk(f) if isinstance(node, ast.FunctionDef) and node is not f
    ]
    assert not inner


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_it_says_what_the_interpreted_core_said(seed: int, compiled: Path, tmp_path: Path) -> None:
    recorded(seed, tmp_path / "record")
    assert "same" in run(compiled, "-m", "scheduler_svc.replay", str(tmp_path / "record"))


def test_the_tests_of_the_core_hold(compiled: Path) -> None:
    """Those that change nothing of it; that it leaves no cycles is one of them."""
    folder = Path(__file__).parent
    files = [file for file in sorted(folder.glob("test_*.py")) if file.stem.removeprefix("test_") not in PLANTING]
    assert len(files) > 10
    run_tests(compiled, *files)


@pytest.mark.slow
def test_its_invariants_hold_after_every_event(compiled: Path) -> None:
    assert '"worlds"' in run(compiled, "-m", "tests.core.campaign", "--events", "10000", "--seed", "9000")


@pytest.mark.slow
def test_services_that_have_it_lose_nothing(compiled: Path) -> None:
    run_tests(compiled, *(ROOT / "tests" / "e2e" / f"test_{name}.py" for name in SERVICES))
