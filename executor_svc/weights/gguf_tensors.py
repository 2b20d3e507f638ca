"""The tensors of a ``.gguf`` file, read and dequantised a few rows at a time by the ``gguf`` library's own rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
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
_CHUNK: Final = 1 << 16


class GGUFTensors:
    """Iterates over (name, array) in the order of the file; ``infos`` may lose entries before."""

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        """Raises ``CheckpointError`` naming the first tensor of a type that is not read."""
        for info in infos.values():
            if info.kind not in SUPPORTED:
                known = ", ".join(kind.name for kind in Quantization if kind in SUPPORTED)
                raise CheckpointError(f"{path}: tensor {info.name}: {info.kind.name} is not supported ({known})")
        self._path = path
        self._infos = infos

    def __iter__(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for info in sorted(self._infos.values(), key=lambda info: info.offset):
            yield info.name, self.read(info)

    def read(self, info: TensorInfo) -> npt.NDArray[Any]:
        """A new float32 array (float16 where the file has that) of ``info.shape``."""
        # Plain reads, no memory map: a file that shrinks while it is read is an error and not a dead process.
        try:
            with self._path.open("rb") as file:
                file.seek(info.offset)
                if info.kind in _PLAIN:
                    out = np.empty(info.shape, _PLAIN[info.kind])
                    _fill(file, out)
                    return out
                return self._dequantized(file, info)
        except OSError as error:
            raise CheckpointError(f"{self._path}: tensor {info.name}: {error}") from error

    def _dequantized(self, file: Any, info: TensorInfo) -> npt.NDArray[np.float32]:
        columns = info.shape[-1]
        out = np.empty(info.shape, np.float32)
        rows = out.reshape(-1, columns)
        raw = np.empty((max(1, _CHUNK // columns), info.size // len(rows)), np.uint8)
        for start in range(0, len(rows), len(raw)):
            part = rows[start : start + len(raw)]
            packed = raw[: len(part)]
            _fill(file, packed)
            # A damaged scale may be an infinity, and infinity times zero warns: the values are the library's anyway.
            with np.errstate(all="ignore"):
                part[:] = dequantize(packed, info.kind)
        return out


def _fill(file: Any, array: npt.NDArray[Any]) -> None:
    view = array.reshape(-1).view(np.uint8)
    if file.readinto(view) != view.size:
        raise OSError("the file ended while it was read")
