"""The tensors of a ``.gguf`` file, read and dequantised some blocks at a time by the ``gguf`` library's own rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Quantization
from gguf.quants import dequantize

from executor_svc.weights.errors import CheckpointError
from executor_svc.weights.gguf_header import TensorInfo

SUPPORTED: Final = {
    Quantization.F32, Quantization.F16, Quantization.BF16, Quantization.Q8_0, Quantization.Q4_0, Quantization.Q4_1,
    Quantization.Q5_0, Quantization.Q5_1, Quantization.Q2_K, Quantization.Q3_K, Quantization.Q4_K, Quantization.Q5_K,
    Quantization.Q6_K,
}  # fmt: skip
_PLAIN: Final[dict[Quantization, npt.DTypeLike]] = {Quantization.F32: "<f4", Quantization.F16: "<f2"}
# Elements that are dequantised at once. The library makes several temporaries of that many float32: they should fit
# the processor's cache, and never the memory of a whole embedding.
_CHUNK: Final = 1 << 17


class GGUFTensors:
    """``infos`` may lose entries before they are read."""

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        """Raises ``CheckpointError`` naming the first tensor of a type that is not read."""
        for info in infos.values():
            if info.kind not in SUPPORTED:
                known = ", ".join(kind.name for kind in Quantization if kind in SUPPORTED)
                raise CheckpointError(f"{path}: tensor {info.name}: {info.kind.name} is not supported ({known})")
        self._path = path
        self._infos = infos

    def read_all(self, half: bool = False) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """(name, array), see ``read``, in the order of the file."""
        for info in sorted(self._infos.values(), key=lambda info: info.offset):
            yield info.name, self.read(info, half)

    def read(self, info: TensorInfo, half: bool = False) -> npt.NDArray[Any]:
        """A new array of ``info.shape``, float32; float16 where the file has that; ``half``: float16 too for what is
        dequantised, which then never is in memory as float32."""
        # Plain reads, no memory map: a file that shrinks while it is read is an error and not a dead process.
        try:
            with self._path.open("rb") as file:
                file.seek(info.offset)
                if info.kind in _PLAIN:
                    out = np.empty(info.shape, _PLAIN[info.kind])
                    _fill(file, out)
                else:
                    out = np.empty(info.shape, np.float16 if half else np.float32)
                    _dequantize(file, info, out)
                return out
        except OSError as error:
            raise CheckpointError(f"{self._path}: tensor {info.name}: {error}") from error


def _dequantize(file: Any, info: TensorInfo, out: npt.NDArray[Any]) -> None:
    block, width = GGML_QUANT_SIZES[info.kind]
    blocks = out.reshape(-1, block)
    raw = np.empty((max(1, _CHUNK // block), width), np.uint8)
    for start in range(0, len(blocks), len(raw)):
        part = blocks[start : start + len(raw)]
        packed = raw[: len(part)]
        _fill(file, packed)
        # A damaged scale may be an infinity, and infinity times zero warns: the values are the library's anyway.
        with np.errstate(all="ignore"):
            values = dequantize(packed.reshape(-1), info.kind).reshape(part.shape)
        torch.from_numpy(part).copy_(torch.from_numpy(values))  # numpy's own float16 takes three times as long


def _fill(file: Any, array: npt.NDArray[Any]) -> None:
    view = array.reshape(-1).view(np.uint8)
    if file.readinto(view) != view.size:
        raise OSError("the file ended while it was read")
