"""Who may import whom, read from the syntax trees: an import inside a function counts, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = {"protos", "scheduler_svc", "executor_svc", "stepwire", "bench", "deploy", "tests"}

# Package -> what of ours it may import besides itself.
ALLOWED = {
    "protos": set(),
    "stepwire": {"protos"},
    "scheduler_svc": {"protos"},
    "executor_svc": {"protos"},
}
TENSORS = {"torch", "numba", "safetensors", "gguf", "transformers", "cupy"}
# Package -> third-party modules that it must do without.
FORBIDDEN = {
    "protos": TENSORS | {"tokenizers", "jinja2"},
    "scheduler_svc": TENSORS,
    "executor_svc": {"grpc", "grpc_health", "grpc_reflection", "jinja2"},
}
# What `pip install stepwire` brings, and nothing else.
CLIENT_NEEDS = {"grpc", "google"}


def sources(package: str) -> Iterator[Path]:
    return (
        path for path in sorted((ROOT / package).rglob("*.py")) if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    )


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted module) of every import, relative ones resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                yield node.lineno, ".".join([*base, node.module] if node.module else base)
            else:
                assert node.module is not None
                yield node.lineno, node.module


def offences(package: str, wrong: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        for line, module in imported(path)
        if module.split(".")[0] in wrong
    ]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package: str) -> None:
    assert list(sources(package)), f"{package} has no sources: is it elsewhere now?"
    wrong = OURS - ALLOWED[package] - {package}
    assert not offences(package, wrong | FORBIDDEN.get(package, set()))


def test_the_client_needs_grpc_and_protobuf_only() -> None:
    import sys

    for path in sources("stepwire"):
        for line, module in imported(path):
            top = module.split(".")[0]
            assert top in CLIENT_NEEDS | {"protos", "stepwire"} | sys.stdlib_module_names, f"{path}:{line}: {module}"
            if top == "protos":  # the rest of protos needs numpy, msgspec and pyzmq
                assert module.startswith("protos.stepwire"), f"{path}:{line}: {module}"


def test_the_core_knows_neither_grpc_nor_text() -> None:
    wrong = {"grpc", "grpc_health", "grpc_reflection", "tokenizers", "jinja2"}
    assert not offences("scheduler_svc/core", wrong)


def test_relative_imports_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.guards.test_imports.ROOT", tmp_path)
    folder = tmp_path / "scheduler_svc" / "core"
    folder.mkdir(parents=True)
    (folder / "x.py").write_text("def f():\n    from ...executor_svc import worker\n    import torch.nn\n")
    assert list(imported(folder / "x.py")) == [(2, "executor_svc"), (3, "torch.nn")]
    assert len(offences("scheduler_svc", {"torch", "executor_svc"})) == 2
