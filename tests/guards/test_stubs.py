"""The committed gRPC stubs are those that `make protos` writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTO = "protos/stepwire/v1/inference.proto"
NAMES = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stubs")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    subprocess.run(
        [*command, f"--python_out={out}", f"--grpc_python_out={out}", f"--pyi_out={out}", PROTO], cwd=ROOT, check=True
    )
    return out / Path(PROTO).parent


@pytest.mark.parametrize("name", NAMES)
def test_stubs_are_up_to_date(regenerated: Path, name: str) -> None:
    committed = ROOT / Path(PROTO).parent / name
    assert committed.read_text() == (regenerated / name).read_text(), "run `make protos`"
