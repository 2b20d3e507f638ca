"""A Hugging Face model folder: config.json, safetensors (one file or sharded with an index), tokenizer files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from executor_svc.models.config import ModelConfig
from executor_svc.models.hf_config import parse_hf_config
from executor_svc.models.hf_parameters import canonical_tensors
from executor_svc.models.parameters import checked_tensors
from executor_svc.weights.errors import CheckpointError, reading
from executor_svc.weights.fingerprint import fingerprint_files
from executor_svc.weights.folder import MAX_LARGE, ModelFolder
from executor_svc.weights.hf_tokenizer import read_assets

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER: Final = 16 << 20  # bytes; room for 130,000 tensors
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A buffer that old Llama checkpoints stored; it is a function of the config, not a parameter.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # tensor -> file


class HFCheckpoint:
    """See ``Checkpoint``."""

    def __init__(self, path: Path) -> None:
        self._folder = ModelFolder(path)
        config = self._folder.json("config.json")
        if config is None:
            raise CheckpointError(f"{path}: no config.json")
        self._shards = self._find_shards()  # file -> tensor names the index promises (None: whatever is there)
        self.config: ModelConfig
        with reading(f"{path}: config.json"):
            parsed = parse_hf_config(config)
        with reading(f"{path}: tokenizer and generation settings"):
            self.config, self.assets = read_assets(self._folder, parsed)
        self.fingerprint = fingerprint_files(self.config.canonical_json(), sorted(self._shards))

    def tensors(self, half: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        return checked_tensors(self.config, canonical_tensors(self.config, self._raw_tensors(half)))

    def _raw_tensors(self, half: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for path, promised in self._shards.items():
            file = path.name
            try:
                with safe_open(path, framework="pt") as shard:
                    _refuse_repeats(path)
                    names = set(shard.keys())
                    if promised is not None and promised != names:
                        odd = ", ".join(sorted(promised ^ names)[:3])
                        raise CheckpointError(f"{file}: does not hold what {_INDEX} says: {odd}")
                    for name in sorted(names):
                        if not _DERIVED.fullmatch(name):
                            yield name, _as_float(file, name, shard.get_tensor(name), half)
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{file}: {error}") from error

    def _find_shards(self) -> dict[Path, set[str] | None]:
        raw = self._folder.bytes(_INDEX, MAX_LARGE)
        names: dict[str, set[str] | None] = {_SINGLE: None} if raw is None else {**_promised(raw)}
        shards = {}
        for name, promised in names.items():
            path = self._folder.find(name)
            if path is None:
                others = sorted(p.name for p in self._folder.path.glob("*.bin"))
                hint = f" (found {others[0]}: pickled weights are not read)" if others else ""
                raise CheckpointError(f"{self._folder.path / name}: no such file{hint}")
            shards[path] = promised
        return shards


def _refuse_repeats(path: Path) -> None:
    """The library takes the last of several entries of one name, of which each may say something else of the data."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise CheckpointError(f"{path.name}: a header of {size} bytes; at most {_MAX_HEADER}")
        header = file.read(size)

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            name, count = Counter(names).most_common(1)[0]
            raise CheckpointError(f"{path.name}: {name!r} appears {count} times in the header")

    try:
        json.loads(header, object_pairs_hook=once)
    except RecursionError as error:
        raise CheckpointError(f"{path.name}: header: {error}") from error


def _promised(index: bytes) -> dict[str, set[str]]:
    """File name -> names of the tensors that the index says are in it."""
    try:
        weight_map = msgspec.json.decode(index, type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{_INDEX}: {error}") from error
    if not weight_map:
        raise CheckpointError(f"{_INDEX}: an empty weight_map")
    promised: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{_INDEX}: {file!r} is not the name of a safetensors file")
        promised.setdefault(file, set()).add(name)
    return promised


def _as_float(file: str, name: str, tensor: torch.Tensor, half: bool) -> torch.Tensor:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {tensor.dtype}, which is not supported")
    if tensor.dtype != torch.bfloat16:
        return tensor
    return tensor.half() if half and tensor.ndim > 1 else tensor.float()
