"""Compiled code is kept where it can be; where it cannot, everything runs all the same."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from numba.core import config

from executor_svc import compiled
from executor_svc.backends.cpu.native import compile as native
from executor_svc.user_cache import user_cache


def twice(x: int) -> int:
    return 2 * x


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only one that numba may use."""
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    compiled._warn.cache_clear()
    return tmp_path


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file can grow: the error of a full disk, but for its number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def kept() -> Callable[[int], int]:
    return compiled.kept_njit(nogil=True)(twice)


def test_code_is_kept_and_found(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert kept()(21) == 42
    assert len(list(folder.rglob("*.nbc"))) == 1
    again = kept()
    assert again(21) == 42
    assert sum(again.stats.cache_hits.values()) == 1  # type: ignore[attr-defined]
    assert not caplog.records


def test_without_a_folder_it_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", "/proc/none")
    assert kept()(21) == 42
    assert "compiled code is not kept" in caplog.text


def test_a_full_disk_costs_the_kept_code_alone(folder: Path, no_room: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert kept()(21) == 42
    assert f"compiled code is not kept: {folder}" in caplog.text
    assert not native._write(folder / "native" / "code.bin", "symbol", b"code" * 100)
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("damaged", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("content", [b"", b"no pickle"])
def test_damaged_files_are_made_again(
    folder: Path, damaged: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert kept()(21) == 42
    (path,) = folder.rglob(damaged)
    path.write_bytes(content)
    assert kept()(21) == 42
    assert f"compiled code cannot be read: {folder}" in caplog.text
    again = kept()
    assert again(21) == 42
    assert sum(again.stats.cache_hits.values()) == 1  # type: ignore[attr-defined]


def test_where_a_user_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/stated")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_cache() == Path("/x/stepwire")
    assert native._folders() == [Path("/stated"), Path("/x/stepwire")]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert user_cache() == Path("/h/.cache/stepwire")
    # As for a user id that the system has no entry for, without HOME.
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert user_cache() is None
    assert native._folders() == [Path("/stated")]
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert native._folders() == []


def test_code_of_a_wider_cpu_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may be shared by machines: the name of a file covers the CPU's features."""
    features = native.llvm.get_host_cpu_features()
    here = native._key("float16", "float32", False)
    assert native._key("float16", "float32", False) == here
    monkeypatch.setattr(native.llvm, "get_host_cpu_features", lambda: {**features, "another": True})
    assert native._key("float16", "float32", False) != here
