"""A checkpoint on disk, opened: what the model is, its tensors one by one, and the assets that text needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from executor_svc.models.config import ModelConfig
from executor_svc.weights.errors import CheckpointError


class Checkpoint(Protocol):
    """``assets`` holds tokenizer.json, tokenizer_config.json, generation_config.json and, where the model has a chat
    template, chat_template.jinja. ``fingerprint`` is the hex SHA-256 of config and tensor bytes."""

    config: ModelConfig
    assets: dict[str, bytes]
    fingerprint: str

    def tensors(self, half: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Canonical name and float32 or float16 tensor, each exactly once; one tensor in memory at a time. ``half`` is
        for a model that keeps float16: a matrix that would be made float32 here comes as float16, in half the memory.

        Raises ``CheckpointError`` on a surplus, repeated, mis-shaped or missing tensor.
        """
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder (config.json + safetensors) or a ``.gguf`` file; ``CheckpointError`` otherwise."""
    from executor_svc.weights.gguf_file import GGUFCheckpoint
    from executor_svc.weights.hf_folder import HFCheckpoint

    path = Path(path)
    if path.is_dir():
        return HFCheckpoint(path)
    if path.is_file() and path.suffix == ".gguf":
        return GGUFCheckpoint(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    raise CheckpointError(f"{path}: not a Hugging Face folder and not a .gguf file")
