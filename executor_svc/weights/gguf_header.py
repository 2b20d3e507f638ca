"""The header of a ``.gguf`` file, read strictly: every count, length, shape and offset is checked before it is used.

The ``gguf`` library's reader makes several arrays of every single metadata element, so that a vocabulary takes seconds
and a header that lies takes all memory. Here the work and the memory are bounded by the limits below, whatever the
file says. Layout: the GGUF specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from executor_svc.weights.errors import CheckpointError

MAX_ENTRIES: Final = 1 << 16  # metadata entries
MAX_TENSORS: Final = 1 << 17
MAX_ELEMENTS: Final = 1 << 22  # of all metadata arrays together; the largest vocabularies need a third of it
MAX_HEADER: Final = 128 << 20  # bytes
MAX_DIMENSIONS: Final = 4
DEFAULT_ALIGNMENT: Final = 32

_SCALARS: Final = {
    GGUFValueType.UINT8: "<u1", GGUFValueType.INT8: "<i1", GGUFValueType.UINT16: "<u2", GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8", GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8",
}  # fmt: skip
_DTYPES: Final = {kind: np.dtype(spelling) for kind, spelling in _SCALARS.items()}


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """``shape`` is numpy's: the last axis is contiguous. ``offset`` is from the start of the file; sizes are bytes."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(slots=True, frozen=True)
class GGUFHeader:
    """``fields``: key -> plain Python value (arrays are lists). ``tensors``: name -> where and what it is."""

    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """Raises ``CheckpointError`` naming what is wrong, with the value and the limit."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data).parse()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error


class _Parser:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._end = min(self._size, MAX_HEADER)
        self._at = 0
        self._elements = 0

    def parse(self) -> GGUFHeader:
        if self._take(4, "magic") != b"GGUF":
            raise CheckpointError("not a GGUF file")
        version = self._integer("<u4", "version")
        if version not in (2, 3):
            big = version & 0xFFFF == 0 and version >> 24 in (2, 3)
            raise CheckpointError(f"GGUF version {version} is not supported{' (big-endian)' * big}")
        tensors = self._count("tensors", MAX_TENSORS)
        entries = self._count("metadata entries", MAX_ENTRIES)
        fields: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string("metadata key")
            if key in fields:
                raise CheckpointError(f"metadata key {key!r} appears twice")
            fields[key] = self._value(key)
        infos = [self._tensor() for _ in range(tensors)]
        return GGUFHeader(fields, self._placed(infos, _alignment(fields)))

    def _placed(self, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """The tensors with offsets from the start of the file, inside it and apart from each other."""
        start = -(-self._at // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for info in infos:
            offset = start + info.offset
            if info.name in placed:
                raise CheckpointError(f"tensor {info.name} appears twice")
            if info.offset % alignment:
                raise CheckpointError(f"tensor {info.name} at {info.offset}, not a multiple of {alignment}")
            if offset + info.size > self._size:
                raise CheckpointError(
                    f"tensor {info.name} of {info.size} bytes at {offset} ends beyond the file's {self._size}"
                )
            placed[info.name] = TensorInfo(info.name, info.kind, info.shape, offset, info.size)
        for before, after in pairwise(sorted(placed.values(), key=lambda info: info.offset)):
            if before.offset + before.size > after.offset:
                raise CheckpointError(f"tensors {before.name} and {after.name} overlap")
        return placed

    def _tensor(self) -> TensorInfo:
        name = self._string("tensor name")
        dimensions = self._integer("<u4", "dimensions")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(f"tensor {name} has {dimensions} dimensions (1 to {MAX_DIMENSIONS})")
        shape = tuple(self._integer("<u8", f"shape of {name}") for _ in range(dimensions))[::-1]
        number = self._integer("<u4", f"type of {name}")
        offset = self._integer("<u8", f"offset of {name}")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise CheckpointError(f"tensor {name}: type {number} is not known") from None
        block, width = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise CheckpointError(f"tensor {name} of shape {shape}: not whole blocks of {block} ({kind.name})")
        return TensorInfo(name, kind, shape, offset, prod(shape) // block * width)

    def _value(self, key: str) -> Any:
        kind = self._type(key)
        if kind == GGUFValueType.STRING:
            return self._string(key)
        if kind != GGUFValueType.ARRAY:
            return self._numbers(kind, 1, key)[0]
        kind = self._type(key)
        if kind == GGUFValueType.ARRAY:
            raise CheckpointError(f"{key}: arrays of arrays are not supported")
        count = self._count(f"elements of {key}", MAX_ELEMENTS - self._elements)
        self._elements += count
        return self._strings(key, count) if kind == GGUFValueType.STRING else self._numbers(kind, count, key)

    def _strings(self, key: str, count: int) -> list[str]:
        # The one loop that runs for every token of a vocabulary: no call for an element.
        data, at, end, length_of = self._data, self._at, self._end, struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                stop = at + 8 + length_of(data, at)[0]
                if stop > end:
                    raise CheckpointError(f"{key} ends beyond the header")
                out.append(data[at + 8 : stop].decode())
                at = stop
        except struct.error:
            raise CheckpointError(f"{key} ends beyond the file") from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{key}[{len(out)}]: {error}") from None
        self._at = at
        return out

    def _numbers(self, kind: GGUFValueType, count: int, key: str) -> list[Any]:
        dtype = _DTYPES[kind]
        values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize, key), dtype).tolist()
        return values

    def _type(self, key: str) -> GGUFValueType:
        number = self._integer("<u4", f"type of {key}")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(f"{key}: value type {number} is not known") from None

    def _string(self, what: str) -> str:
        raw = self._take(self._integer("<u8", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{what}: {error}") from None

    def _count(self, what: str, limit: int) -> int:
        count = self._integer("<u8", what)
        if count > limit:
            raise CheckpointError(f"{count} {what}; at most {limit}")
        return count

    def _integer(self, spelling: str, what: str) -> int:
        return int.from_bytes(self._take(int(spelling[2:]), what), "little")

    def _take(self, count: int, what: str) -> bytes:
        if count > self._end - self._at:
            of = f"of at most {MAX_HEADER} bytes" if self._end < self._size else f"of a file of {self._size} bytes"
            raise CheckpointError(f"{what}: {count} bytes at {self._at} end beyond the header {of}")
        self._at += count
        return self._data[self._at - count : self._at]


def _alignment(fields: dict[str, Any]) -> int:
    value = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 0 < value <= 1 << 20 or value & (value - 1):
        raise CheckpointError(f"general.alignment = {value!r} is not a power of two up to {1 << 20}")
    return value
