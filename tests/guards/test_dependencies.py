"""What a package imports is named by its own extra in pyproject.toml: an image with only that extra must run it."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.guards.test_imports import OURS, imported, sources

ROOT = Path(__file__).resolve().parents[2]
# Package -> the extras that its installation is made of (besides the client's own dependencies).
EXTRAS = {
    "stepwire": [],
    "protos": ["link"],
    "scheduler_svc": ["scheduler"],
    "executor_svc": ["executor", "hub", "gpu"],
    "deploy": ["scheduler"],
    "tests": ["dev", "gpu"],
}
# Module -> distribution, where the top-level name belongs to several or is not installed here.
MODULES = {"google.rpc": "googleapis-common-protos", "google.protobuf": "protobuf", "cupy": "cupy-cuda13x"}
# Comes with a distribution that names it as its own part: numba and its compiler, cupy and its runtime.
PARTS = {"llvmlite": "numba", "cupy_backends": "cupy-cuda13x"}


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@cache
def declared(extras: tuple[str, ...]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {_name(requirement) for requirement in project["dependencies"]}
    waiting = list(extras)
    while waiting:
        for requirement in project["optional-dependencies"][waiting.pop()]:
            if requirement.startswith("stepwire["):
                waiting += requirement[len("stepwire[") : -1].split(",")
            else:
                names.add(_name(requirement))
    return names


_installed = cache(packages_distributions)  # it reads every package's file list


def _distributions(module: str) -> set[str]:
    for prefix, distribution in {**MODULES, **PARTS}.items():
        if module == prefix or module.startswith(prefix + "."):
            return {distribution}
    return {_name(name) for name in _installed().get(module.split(".")[0], ["unknown"])}


@pytest.mark.parametrize("package", EXTRAS)
def test_imports_are_declared(package: str) -> None:
    names = declared(tuple(EXTRAS[package]))
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in sources(package)
        for line, module in imported(path)
        if module.split(".")[0] not in OURS | sys.stdlib_module_names and not _distributions(module) & names
    ]
    assert not missing
