"""The one build function: a file of ``cuda/`` and the kernels wanted from it -> PTX or a cubin, cached on disk.

CI, the PTX interpreter and the executor all build here, so what is tested is what runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_svc.kernels import nvrtc
from executor_svc.user_cache import user_cache

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).resolve().parents[2] / "cuda"
_FORMAT = 1  # of a cache entry; part of the key
# Stated in full, so that the result does not depend on a wrapper's defaults. No -use_fast_math: where a kernel wants a
# fast exponential it says so (common.cuh), and denormals are kept.
_OPTIONS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v", "--fmad=true")


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled file. ``arch`` is ``sm_90a`` for a cubin, ``compute_90`` for PTX."""

    source: str
    arch: str
    data: bytes
    log: str
    lowered: dict[str, str]  # kernel expression -> symbol in ``data``
    cached: bool  # read from the disk cache

    @property
    def is_ptx(self) -> bool:
        return self.arch.startswith("compute_")


def arch_of(capability: tuple[int, int]) -> str:
    """The cubin architecture of a device: with its own instructions (``a``) from Hopper on."""
    major, minor = capability
    if major < 8:
        raise ValueError(f"compute capability {major}.{minor} is below 8.0, the oldest these kernels run on")
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def cache_dir() -> Path | None:
    """None where nothing can be kept: the user has no home."""
    folder = user_cache()
    return folder / "kernels" if folder else None


def build(
    source: str,
    expressions: Sequence[str],
    arch: str,
    *,
    cache: Path | None = None,
    overrides: dict[str, str] | None = None,
) -> Image:
    """Compile the kernels ``expressions`` (such as ``"paged_decode<bf16, 128>"``) of ``cuda/<source>`` for ``arch``.

    ``arch`` ``sm_NN[a]`` gives a cubin, ``compute_NN[a]`` PTX. ``cache``: a folder, by default ``cache_dir()``.
    ``overrides`` replaces the text of files by name, for tests that plant bugs. The cache key covers every text that
    can be included, the options, the names and the compiler's version. ``nvrtc.NvrtcUnavailable`` without a compiler;
    ``nvrtc.NvrtcError`` with its log if the source does not compile.
    """
    if not arch.startswith(("sm_", "compute_")):
        raise ValueError(f"architecture {arch!r}: sm_NN or compute_NN is wanted")
    files = {path.name: path.read_text() for path in sorted(SOURCE_DIR.glob("*.cu*"))}
    files.update(overrides or {})
    headers = {name: text for name, text in files.items() if name.endswith(".cuh")}
    options = [f"-arch={arch}", *_OPTIONS]
    key = _key(source, files[source], headers, options, expressions)
    folder = cache if cache is not None else cache_dir()
    path = folder / f"{Path(source).stem}-{arch}-{key[:32]}.kernel" if folder is not None else None
    found = _read(path, source, arch) if path is not None else None
    if found is not None:
        return found
    made = nvrtc.compile_source(
        files[source], source, headers, options, list(expressions), want_ptx=arch.startswith("compute_")
    )
    image = Image(source, arch, made.image, made.log, made.lowered, cached=False)
    if path is not None:
        _write(path, image)
    return image


def _key(source: str, text: str, headers: dict[str, str], options: list[str], expressions: Sequence[str]) -> str:
    parts = [_FORMAT, nvrtc.version(), source, text, headers, options, list(expressions)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read(path: Path, source: str, arch: str) -> Image | None:
    """A cache entry: one JSON line, then the image. A damaged entry is dropped and built again."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    try:
        fields = json.loads(head)
        if hashlib.sha256(data).hexdigest() != fields["sha256"]:
            raise ValueError("checksum")
        return Image(source, arch, data, fields["log"], fields["lowered"], cached=True)
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("kernel cache entry %s is damaged (%s): building again", path.name, error)
        return None


def _write(path: Path, image: Image) -> None:
    """Whole or not at all: other processes may build the same file at once. A full or read-only disk only warns."""
    digest = hashlib.sha256(image.data).hexdigest()
    head = json.dumps({"sha256": digest, "log": image.log, "lowered": image.lowered}).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head + b"\n" + image.data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning("kernel cache %s cannot be written: %s", path.parent, error)
