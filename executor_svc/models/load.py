"""From a checkpoint's path to a model that can run: weights fused and packed one layer at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from executor_svc.backends.cpu.build import CpuBuilder, make_builder
from executor_svc.backends.cuda.device import Device
from executor_svc.models.base import Model, ModelFacts
from executor_svc.models.config import ModelConfig
from executor_svc.models.hf_families import ARCHITECTURES
from executor_svc.models.parameters import EMBEDDING, FINAL_NORM, HEAD, layer_shapes, parameter_shapes
from executor_svc.models.rope import rope_table, table_digest
from executor_svc.weights.checkpoint import Checkpoint, open_checkpoint
from executor_svc.weights.errors import CheckpointError

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (tensors read, tensors in all)
MAX_CONTEXT = 1 << 22  # tokens that are served unasked: the rope table has a row for each
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model, the assets its text side needs (see ``Checkpoint``), and its config."""

    model: Model
    assets: dict[str, bytes]
    config: ModelConfig


def load_model(
    path: str | Path,
    device: Device | None = None,
    weights: str = "float16",
    threads: int | None = None,
    attention: str | None = None,
    progress: Progress | None = None,
    name: str | None = None,
    context_length: int | None = None,
    kv_type: str | None = None,
) -> LoadedModel:
    """Open ``path`` (a Hugging Face folder or a .gguf file) and make it ready to run.

    ``device``: a GPU, or None for the CPU. ``weights``: ``float16`` (on the CPU packed, arithmetic in float32),
    ``float32``, on the CPU ``int8``, or on a GPU ``bfloat16``. ``threads``: CPU threads, all cores if None.
    ``attention``: ``numba``, ``torch``, or None for numba where it is installed. ``name``: how the model is
    announced, the file's or folder's name if None. ``context_length``: tokens to serve, all that the model is for if
    None. ``kv_type``: of the KV cache on the CPU, see ``make_builder``; on a GPU that of the weights. Raises
    ``CheckpointError`` for a checkpoint that cannot be served correctly and ``ValueError`` for an unknown option.
    """
    path = Path(path)
    checkpoint = open_checkpoint(path)
    config = _served(checkpoint.config, context_length)
    count = threads or os.cpu_count() or 1
    torch.set_num_threads(count)
    rope = rope_table(config.rope, config.head_dim, config.context_length)
    local = None
    if config.local_rope is not None:
        local = rope_table(config.local_rope, config.head_dim, config.context_length)
    builder: CpuBuilder
    if device is None:
        builder = make_builder(config, rope, weights, count, attention, local, kv_type)
    else:
        from executor_svc.backends.cuda.build import CudaBuilder

        if kv_type is not None:
            raise ValueError(f"KV type {kv_type!r}: only on the CPU; on a GPU it is that of the weights")
        builder = CudaBuilder(config, rope, weights, device, local)
    _fill(builder, checkpoint, weights == "float16", progress)
    numerics = f"{builder.numerics()}, rope {table_digest(rope, local)}"
    facts = ModelFacts(
        name=name or (path.stem if path.suffix == ".gguf" else path.resolve().name),
        architecture=ARCHITECTURES[config.family],
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        num_layers=config.num_layers,
        kv_bytes_per_token=2 * config.num_layers * config.kv_size * getattr(torch, builder.kv_type).itemsize,
        eos_token_ids=config.eos_token_ids,
        fingerprint=checkpoint.fingerprint,
        numerics=hashlib.sha256(f"{checkpoint.fingerprint} {numerics}".encode()).hexdigest(),
    )
    log.info("%s: %s; %s", facts.name, facts.fingerprint[:12], numerics)
    return LoadedModel(builder.build(facts), checkpoint.assets, config)


def _served(config: ModelConfig, context_length: int | None) -> ModelConfig:
    """With the context that is served: rope types that have factors for short and long contexts choose by it."""
    if context_length is None:
        if config.context_length > MAX_CONTEXT:
            raise CheckpointError(
                f"config: a context of {config.context_length} tokens; beyond {MAX_CONTEXT}, say which with "
                "--context-length"
            )
        return config
    if not 1 <= context_length <= config.context_length:
        raise ValueError(f"context length {context_length}: the model is for 1 to {config.context_length} tokens")
    return dataclasses.replace(config, context_length=context_length)


def _fill(builder: CpuBuilder, checkpoint: Checkpoint, half: bool, progress: Progress | None) -> None:
    """Hand over each parameter, whole layers as soon as they are complete: the model is never twice in memory."""
    config = checkpoint.config
    pending: dict[int, dict[str, torch.Tensor]] = {}
    wanted = [len(layer_shapes(config, index)) for index in range(config.num_layers)]
    for parameter, tensor in _counted(checkpoint, half, progress):
        match = _LAYER.fullmatch(parameter)
        if match is not None:
            index = int(match[1])
            layer = pending.setdefault(index, {})
            layer[match[2]] = tensor
            if len(layer) == wanted[index]:
                builder.set_layer(index, pending.pop(index))
        elif parameter == FINAL_NORM:
            builder.set_final_norm(tensor)
        else:
            if parameter == EMBEDDING:
                builder.set_embedding(tensor)
            if parameter == HEAD or config.tie_embeddings:
                builder.set_head(tensor)


def _counted(checkpoint: Checkpoint, half: bool, progress: Progress | None) -> Iterator[tuple[str, torch.Tensor]]:
    total = len(parameter_shapes(checkpoint.config))
    for done, item in enumerate(checkpoint.tensors(half), 1):
        yield item
        if progress is not None:
            progress(done, total)
