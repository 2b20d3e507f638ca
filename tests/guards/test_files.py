"""What every file of the repository must hold to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 500
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$")

# Hosts of package registries, and paths of one machine: a clone works with whatever pip and the disk are set up with.
# Written in pieces, so that this file does not name them either.
HOSTS = re.compile(
    "|".join(["py" + r"pi\.org", "python" + "hosted", "npm" + r"js\.", "deb\\." + "debian", "/opt/" + "wheels"])
)
UNFINISHED = re.compile(r"raise NotImplementedError|\bTODO\b|\bFIXME\b|\bXXX\b")


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str | None:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


def sources() -> list[Path]:
    """Hand-written ones."""
    return [path for path in tracked() if path.suffix in (".py", ".cu", ".cuh") and not GENERATED.search(path.name)]


def test_no_source_file_is_longer_than_500_lines() -> None:
    assert sources()
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


def test_no_file_names_a_registry_host_or_a_path_of_one_machine() -> None:
    found = [str(path.relative_to(ROOT)) for path in tracked() if HOSTS.search(text_of(path) or "")]
    assert not found


def test_no_source_is_left_unfinished() -> None:
    mine = Path(__file__)
    found = [str(path.relative_to(ROOT)) for path in sources() if path != mine and UNFINISHED.search(path.read_text())]
    assert not found


def test_no_model_is_committed() -> None:
    assert not [path for path in tracked() if path.stat().st_size > 1_000_000]
