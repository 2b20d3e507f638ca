"""The committed gRPC stubs are those that `make protos` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "protos/stepwire/v1"
PROTOS = (f"{FOLDER}/inference.proto", f"{FOLDER}/admin.proto")
NAMES = tuple(f"{stem}{end}" for stem in ("inference", "admin") for end in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"))


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    subprocess.run(
        [*command, f"--python_out={out}", f"--grpc_python_out={out}", f"--pyi_out={out}", *PROTOS], cwd=ROOT, check=True
    )
    return out / FOLDER


@pytest.mark.parametrize("name", NAMES)
def test_stubs_are_up_to_date(regenerated: Path, name: str) -> None:
    committed = ROOT / FOLDER / name
    assert committed.read_text() == (regenerated / name).read_text(), "run `make protos`"
