"""Files that are damaged or lie: one clear error, in bounded memory and time, whatever they say."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from executor_svc.weights import gguf_header, hf_folder
from executor_svc.weights.checkpoint import open_checkpoint
from executor_svc.weights.errors import CheckpointError
from executor_svc.weights.gguf_header import read_header
from tests.executor.model.gguf_writer import write_gguf

U32, STRING, ARRAY = 4, 8, 9  # GGUF value types


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture(scope="module")
def gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tiny, tmp_path_factory.mktemp("gguf") / "whole.gguf", "F32").read_bytes()


def refuse(path: Path, *words: str, memory: int = 64 << 20) -> None:
    """Opening and reading to the end is refused, naming ``words``, within seconds and ``memory`` bytes."""
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as error:
            for _ in open_checkpoint(path).tensors():
                pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5
    assert peak < memory
    for word in words:
        assert word in str(error.value), str(error.value)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def header(entries: list[bytes] = [], infos: list[bytes] = [], counts: tuple[int, int] | None = None) -> bytes:  # noqa: B006
    tensors, fields = counts or (len(infos), len(entries))
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + b"".join(entries) + b"".join(infos)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def array(key: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count) + data


GGUF_LIES: dict[str, tuple[bytes, str]] = {
    "a billion entries": (header(counts=(0, 10**9)), "1000000000 metadata entries"),
    "a billion tensors": (header(counts=(10**9, 0)), "1000000000 tensors"),
    "all entries there are": (header(counts=(0, 2**64 - 1)), "metadata entries"),
    "a billion numbers": (header([array("a", U32, 10**9)]), "1000000000 elements of a"),
    "a billion strings": (header([array("a", STRING, 10**9)]), "1000000000 elements of a"),
    "numbers beyond the end": (header([array("a", U32, 10**6)]), "a: 4000000 bytes"),
    "strings beyond the end": (header([array("a", STRING, 10**6, text("x") * 3)]), "a ends beyond"),
    "a string of 2^63 bytes": (header([text("a") + struct.pack("<IQ", STRING, 2**63)]), "a: 9223372036854775808 bytes"),
    "a key of 2^64-1 bytes": (header([struct.pack("<Q", 2**64 - 1)]), "metadata key"),
    "arrays in arrays": (header([array("a", ARRAY, 1)]), "arrays of arrays"),
    "an unknown value": (header([text("a") + struct.pack("<I", 77)]), "value type 77"),
    "a key twice": (header([text("a") + struct.pack("<II", U32, 1)] * 2), "'a' appears twice"),
    "text that is none": (header([text(b"\xff\xfe") + struct.pack("<II", U32, 1)]), "metadata key"),
    "an odd alignment": (
        header([text("general.alignment") + struct.pack("<II", U32, 48)], [tensor("t", (4,))]) + bytes(999),
        "general.alignment = 48",
    ),
    "no alignment": (
        header([text("general.alignment") + struct.pack("<II", U32, 0)], [tensor("t", (4,))]) + bytes(999),
        "general.alignment = 0",
    ),
    "a billion dimensions": (header(infos=[text("t") + struct.pack("<I", 10**9)]), "t has 1000000000 dimensions"),
    "more elements than there are": (header(infos=[tensor("t", (2**62, 2**62))]) + bytes(999), "ends beyond"),
    "no elements": (header(infos=[tensor("t", (0, 5))]) + bytes(999), "t of shape (5, 0)"),
    "half a block": (header(infos=[tensor("t", (33,), kind=2)]) + bytes(999), "not whole blocks of 32"),
    "an unknown type": (header(infos=[tensor("t", (32,), kind=999)]) + bytes(999), "type 999"),
    "an offset beyond the end": (header(infos=[tensor("t", (4,), offset=2**62)]) + bytes(999), "ends beyond"),
    "an offset between": (header(infos=[tensor("t", (4,), offset=3)]) + bytes(999), "not a multiple of 32"),
    "a tensor twice": (
        header(infos=[tensor("t", (4,)), tensor("t", (4,), offset=32)]) + bytes(999),
        "t appears twice",
    ),
    "tensors over each other": (
        header(infos=[tensor("t", (16,)), tensor("u", (4,), offset=32)]) + bytes(999),
        "t and u overlap",
    ),
    "another byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "another version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
}


@pytest.mark.parametrize("lie", GGUF_LIES)
def test_gguf_headers_that_lie(lie: str, tmp_path: Path) -> None:
    data, words = GGUF_LIES[lie]
    (tmp_path / "a.gguf").write_bytes(data)
    refuse(tmp_path / "a.gguf", words, memory=4 << 20)


def test_gguf_arrays_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_ELEMENTS", 1 << 16)
    entries = [array(name, STRING, 1 << 15, bytes(8 << 15)) for name in "abc"]
    (tmp_path / "a.gguf").write_bytes(header(entries))
    refuse(tmp_path / "a.gguf", "32768 elements of c; at most 0", memory=8 << 20)
    monkeypatch.setattr(gguf_header, "MAX_HEADER", 1 << 16)
    (tmp_path / "a.gguf").write_bytes(header([array("a", 0, 1 << 15, bytes(1 << 15))] * 3))
    refuse(tmp_path / "a.gguf", "'a' appears twice")
    (tmp_path / "a.gguf").write_bytes(header([array(name, 0, 1 << 15, bytes(1 << 15)) for name in "ab"]))
    refuse(tmp_path / "a.gguf", "b: 32768 bytes", "at most 65536 bytes", memory=1 << 20)


def test_truncated_gguf(gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for size in [*range(0, 64, 7), *range(64, 20_000, 1111), len(gguf) // 2, len(gguf) - 1]:
        path.write_bytes(gguf[:size])
        refuse(path)
    for old, new in ((b"llama.", b"lLama."), (b"smollm", b"smoLLm"), (b"GGUF", b"GGML")):
        path.write_bytes(gguf.replace(old, new))
        refuse(path)


def test_gguf_that_shrinks_while_it_is_read(gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf)
    checkpoint = open_checkpoint(path)
    path.write_bytes(gguf[: max(info.offset for info in read_header(path).tensors.values())])
    with pytest.raises(CheckpointError, match="ended while it was read"):
        list(checkpoint.tensors())


def test_damaged_safetensors(copy: Path) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    entries = json.loads(whole[8 : 8 + length])

    def with_header(change: Callable[[dict[str, Any]], object]) -> bytes:
        value = json.loads(json.dumps(entries))
        change(value["model.norm.weight"])
        raw = json.dumps(value).encode()
        return struct.pack("<Q", len(raw)) + raw + whole[8 + length :]

    for damaged in (
        b"",
        whole[:4],
        whole[: 8 + length // 2],
        whole[:-100],
        *(struct.pack("<Q", size) + whole[8:] for size in (0, length - 3, 2**40, 2**62, 2**63, 2**64 - 1)),
        struct.pack("<Q", 9) + b'{"a":[]}]' + whole,
        whole[:8] + b"[" * length + whole[8 + length :],
        with_header(lambda entry: entry.update(data_offsets=[0, 2**62])),
        with_header(lambda entry: entry.update(data_offsets=[9, 1])),
        with_header(lambda entry: entry.update(data_offsets=entries["model.embed_tokens.weight"]["data_offsets"])),
        with_header(lambda entry: entry.update(shape=[2**62, 2**62])),
        with_header(lambda entry: entry.update(shape=[65])),
        with_header(lambda entry: entry.update(dtype="F99")),
    ):
        file.write_bytes(damaged)
        refuse(copy, memory=16 << 20)


def test_names_repeated_in_a_safetensors_header(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes the last: with one name's data described twice, either may be what was meant."""
    path = copy / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    entries, name = json.loads(whole[8 : 8 + length]), "model.layers.0.self_attn.q_proj.weight"
    entries.pop("__metadata__", None)
    header, entry = json.dumps(entries), entries[name]

    def write(more: str) -> None:
        raw = f"{header[:-1]}{more}}}".encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + whole[8 + length :])

    write(f', "{name}": {json.dumps(entry | {"shape": entry["shape"][::-1]})}')
    refuse(copy, f"model.safetensors: '{name}' appears 2 times in the header")
    write(f', "{name.replace("q_proj", chr(92) + "u0071_proj")}": {json.dumps(entry)}')  # another spelling of the name
    refuse(copy, f"'{name}' appears 2 times")
    write(', "__metadata__": {"format": "pt", "format": "np"}')
    refuse(copy, "'format' appears 2 times")
    write("")
    assert list(open_checkpoint(copy).tensors())
    monkeypatch.setattr(hf_folder, "_MAX_HEADER", len(header) - 1)
    refuse(copy, f"a header of {len(header)} bytes; at most {len(header) - 1}")


def test_nothing_is_read_from_outside_the_folder(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json", "model.safetensors"):
        original = (copy / name).read_bytes()
        (copy / name).unlink()
        (copy / name).symlink_to(secret)
        refuse(copy, name, "outside the model's folder")
        (copy / name).unlink()
        (copy / name).write_bytes(original)
    index = copy / "model.safetensors.index.json"
    for file in ("../secret", "/etc/passwd", "../copy/model.safetensors", "a/b.safetensors", ".."):
        index.write_text(json.dumps({"weight_map": {"x": file}}))
        refuse(copy, file)
    index.unlink()
    # A snapshot in the hub's cache is links to the blobs beside it.
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in copy.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert len(list(open_checkpoint(snapshot).tensors())) == len(load_file(copy / "model.safetensors"))


def test_json_that_is_too_deep_too_large_or_none(copy: Path) -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    for name in (*names, "model.safetensors.index.json"):
        original = (copy / name).read_bytes() if (copy / name).exists() else None
        for damaged in (deep, b'{"a": ' + deep + b"}", b"\xff\xfe", b"", b"[]", b'"x"', b'{"a": 1', b"\0" * 99):
            (copy / name).write_bytes(damaged)
            if damaged != b'{"a": ' + deep + b"}" or name in ("config.json", "model.safetensors.index.json"):
                refuse(copy, name)
        with (copy / name).open("wb") as file:
            file.truncate(1 << 40)  # a sparse file: its size is a lie too
        refuse(copy, name, "larger than", memory=200 << 20)
        (copy / name).unlink()
        if original is not None:
            (copy / name).write_bytes(original)


def test_a_config_cannot_name_parameters_without_end(copy: Path) -> None:
    config = open_checkpoint(copy).config
    for layers, experts in ((4096, 0), (1, 4096), (2048, 2048)):
        with pytest.raises(CheckpointError, match=f"{layers} layers of {experts} experts; at most"):
            dataclasses.replace(
                config, num_layers=layers, num_experts=experts, experts_per_token=1, expert_intermediate_size=64
            )


def campaign(tiny: Path, folder: Path, seed: int, count: int, *options: str) -> dict[str, int]:
    shutil.copytree(tiny, folder / "tiny")
    gguf = write_gguf(tiny, folder / "tiny.gguf", "Q8_0")
    command = [sys.executable, "-m", "tests.executor.model.hostile", str(folder / "tiny"), str(gguf), str(seed)]
    done = subprocess.run([*command, str(count), *options], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["slowest"] < 10
    seen: dict[str, int] = result["seen"]
    assert sum(seen.values()) == count
    return seen


def test_mutated_files_are_refused_or_load(tiny: Path, tmp_path: Path) -> None:
    seen = campaign(tiny, tmp_path, 1, 400)
    # The mutations reach both ends of every kind of file that holds weights or settings.
    for what in ("gguf", "config.json", "model.safetensors", "tokenizer_config.json"):
        assert seen[f"{what} refused"], seen
        assert seen[f"{what} loaded"], seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "count", "options"), [(2, 6000, ()), (3, 150, ("load",))])
def test_mutation_campaign(tiny: Path, tmp_path: Path, seed: int, count: int, options: tuple[str, ...]) -> None:
    campaign(tiny, tmp_path, seed, count, *options)
