"""A Hugging Face model folder: config.json, safetensors (one file or sharded with an index), tokenizer files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executor_svc.models.config import ModelConfig
from executor_svc.models.hf_config import parse_hf_config, token_id_list
from executor_svc.models.parameters import checked_tensors
from executor_svc.weights import assets as asset_files
from executor_svc.weights.errors import CheckpointError
from executor_svc.weights.fingerprint import fingerprint_files

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_JSON = 64 << 20  # bytes
# A buffer that old Llama checkpoints stored; it is a function of the config, not a parameter.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class HFCheckpoint:
    """See ``Checkpoint``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config: ModelConfig = parse_hf_config(self._json("config.json"))
        self._shards = self._find_shards()  # file name -> tensor names the index promises (None: whatever is there)
        self.assets = self._read_assets()
        files = [folder / name for name in sorted(self._shards)]
        self.fingerprint = fingerprint_files(self.config.canonical_json(), files)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return checked_tensors(self.config, self._raw_tensors())

    def _raw_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file, promised in self._shards.items():
            try:
                with safe_open(self._folder / file, framework="pt") as shard:
                    names = set(shard.keys())
                    if promised is not None and promised != names:
                        odd = ", ".join(sorted(promised ^ names)[:3])
                        raise CheckpointError(f"{file}: does not hold what {_INDEX} says: {odd}")
                    for name in sorted(names):
                        if not _DERIVED.fullmatch(name):
                            yield name, _as_float(file, name, shard.get_tensor(name))
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{file}: {error}") from error

    def _find_shards(self) -> dict[str, set[str] | None]:
        if (self._folder / _INDEX).is_file():
            weight_map = self._json(_INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{_INDEX}: no weight_map")
            shards: dict[str, set[str] | None] = {}
            for name, file in weight_map.items():
                if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                    raise CheckpointError(f"{_INDEX}: {file!r} is not the name of a safetensors file")
                promised = shards.setdefault(file, set())
                assert promised is not None
                promised.add(name)
        else:
            shards = {_SINGLE: None}
        for file in shards:
            if not (self._folder / file).is_file():
                others = sorted(p.name for p in self._folder.glob("*.bin"))
                hint = f" (found {others[0]}: pickled weights are not read)" if others else ""
                raise CheckpointError(f"{self._folder / file}: no such file{hint}")
        return shards

    def _read_assets(self) -> dict[str, bytes]:
        tokenizer = self._bytes("tokenizer.json")
        if tokenizer is None:
            raise CheckpointError(f"{self._folder}: no tokenizer.json")
        stated = self._json("tokenizer_config.json", default={})
        generation = self._json("generation_config.json", default={})
        template = self._bytes("chat_template.jinja")
        if template is None and isinstance(stated.get("chat_template"), str):
            template = stated["chat_template"].encode()
        eos = token_id_list(generation.get("eos_token_id"), "generation_config: eos_token_id")
        eos += self.config.eos_token_ids
        special = [(t["id"], t["content"]) for t in _added_tokens(tokenizer) if t.get("special")]
        eos += tuple(asset_files.end_of_turn_ids(special, template.decode() if template else None))
        self.config = dataclasses.replace(self.config, eos_token_ids=tuple(dict.fromkeys(eos)))
        bos_text, eos_text = (_token_text(stated.get(key)) for key in ("bos_token", "eos_token"))
        out = {
            "tokenizer.json": tokenizer,
            "tokenizer_config.json": asset_files.tokenizer_config(
                bos_text, eos_text, stated.get("add_bos_token") is True
            ),
            "generation_config.json": asset_files.generation_config(self.config, self.config.eos_token_ids, generation),
        }
        if template is not None:
            out["chat_template.jinja"] = template
        return out

    def _bytes(self, name: str) -> bytes | None:
        path = self._folder / name
        if not path.is_file():
            return None
        if path.stat().st_size > _MAX_JSON:
            raise CheckpointError(f"{path}: larger than {_MAX_JSON} bytes")
        return path.read_bytes()

    def _json(self, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        raw = self._bytes(name)
        if raw is None:
            if default is None:
                raise CheckpointError(f"{self._folder}: no {name}")
            return default
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{name}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{name}: not a JSON object")
        return value


def _added_tokens(tokenizer: bytes) -> list[dict[str, Any]]:
    try:
        tokens = json.loads(tokenizer).get("added_tokens") or []
        return [t for t in tokens if isinstance(t["id"], int) and isinstance(t["content"], str)]
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"tokenizer.json: {error}") from error


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json spells a token as a string or as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_float(file: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {tensor.dtype}, which is not supported")
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
