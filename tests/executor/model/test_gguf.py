"""GGUF files against the ``gguf`` library itself: its reader's header, its dequantiser's values, its names of types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter
from gguf import GGMLQuantizationType as Quantization
from gguf.quants import dequantize

from executor_svc.weights.errors import CheckpointError
from executor_svc.weights.gguf_header import read_header
from executor_svc.weights.gguf_tensors import SUPPORTED, GGUFTensors

# Where a block's float16 scales are, in bytes: any other byte may have any value.
SCALES = {
    Quantization.Q8_0: (0,), Quantization.Q4_0: (0,), Quantization.Q4_1: (0, 2), Quantization.Q5_0: (0,),
    Quantization.Q5_1: (0, 2), Quantization.Q2_K: (80, 82), Quantization.Q3_K: (108,), Quantization.Q4_K: (0, 2),
    Quantization.Q5_K: (0, 2), Quantization.Q6_K: (208,),
}  # fmt: skip
PLAIN = {Quantization.F32: np.float32, Quantization.F16: np.float16}


def random_blocks(kind: Quantization, rows: int, columns: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """uint8 [rows, bytes of a row]: valid data of the type, every code possible."""
    generator = np.random.default_rng(seed)
    block, width = GGML_QUANT_SIZES[kind]
    if kind in PLAIN or kind == Quantization.BF16:
        values = generator.standard_normal((rows, columns)).astype(np.float32)
        if kind == Quantization.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(PLAIN[kind]).view(np.uint8)
    data = generator.integers(0, 256, (rows * columns // block, width), np.uint8)
    for offset in SCALES.get(kind, ()):
        scales = generator.standard_normal(len(data)).astype(np.float16)
        data[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[Quantization, np.ndarray[Any, Any]]], **values: Any) -> Path:
    writer = GGUFWriter(str(path), "llama")
    for key, value in values.items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    for name, (kind, data) in tensors.items():
        if kind in PLAIN:
            writer.add_tensor(name, data.view(PLAIN[kind]))
        else:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
def test_values_are_the_librarys_own(kind: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"wide": (5, 1024), "tall": (300, 256), "one": (1, 256)}
    path = write(
        tmp_path / "a.gguf",
        {name: (kind, random_blocks(kind, *shape, seed=i)) for i, (name, shape) in enumerate(shapes.items())},
    )
    header = read_header(path)
    tensors = dict(GGUFTensors(path, header.tensors).read_all())
    monkeypatch.setattr("executor_svc.weights.gguf_tensors._CHUNK", 1000)  # not a multiple of any row
    in_small_parts = dict(GGUFTensors(path, header.tensors).read_all())
    for tensor in GGUFReader(path).tensors:
        expected = tensor.data if kind in PLAIN else dequantize(tensor.data, kind)
        assert tensors[tensor.name].shape == shapes[tensor.name]
        assert np.isfinite(expected).all()
        for ours in (tensors, in_small_parts):
            assert ours[tensor.name].dtype == expected.dtype
            assert np.array_equal(ours[tensor.name], expected)
        half = GGUFTensors(path, header.tensors).read(header.tensors[tensor.name], half=True)
        assert half.dtype == (np.float32 if kind == Quantization.F32 else np.float16)
        assert np.array_equal(half, expected.astype(half.dtype))


@pytest.mark.parametrize("kind", sorted(set(Quantization) - SUPPORTED), ids=lambda kind: kind.name)
def test_other_types_are_refused_by_name(kind: Quantization, tmp_path: Path) -> None:
    block, _ = GGML_QUANT_SIZES[kind]
    path = write(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (kind, random_blocks(kind, 2, 4 * block))})
    with pytest.raises(CheckpointError, match=rf"blk\.0\.attn_q\.weight: {kind.name} is not supported"):
        GGUFTensors(path, read_header(path).tensors)


def assert_header_is_the_librarys(path: Path) -> None:
    header, reader = read_header(path), GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.fields == fields
    assert [type(value) for value in header.fields.values()] == [type(value) for value in fields.values()]
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.kind, info.offset, info.size) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert info.shape[::-1] == tuple(tensor.shape.tolist())


def test_header_is_the_librarys(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    for name, value in {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000, "int32": -5,
        "float32": 0.1, "uint64": 2**63, "int64": -(2**62), "float64": 0.1, "bool": True,
        "string": "na\u00efve \U0001f642",
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(f"a.{name}", value)
    writer.add_array("a.strings", ["", "a", "\u6771\u4eac"])
    writer.add_array("a.numbers", [1, 2, 300])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_array("a.flags", [True, False])
    writer.add_custom_alignment(64)
    writer.add_tensor("three", np.zeros((2, 3, 4), np.float32))
    writer.add_tensor("one", np.zeros(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_header_is_the_librarys(tmp_path / "a.gguf")


def test_header_of_the_real_model(real_model: Path) -> None:
    assert_header_is_the_librarys(real_model)
