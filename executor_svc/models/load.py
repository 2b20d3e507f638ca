"""From a checkpoint's path to a model that can run: weights fused and packed one layer at a time."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from executor_svc.backends.cpu.build import CpuBackend, make_backend
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder, DecoderLayer
from executor_svc.models.parameters import EMBEDDING, FINAL_NORM, HEAD, layer_shapes, parameter_shapes
from executor_svc.models.rope import rope_table
from executor_svc.weights.checkpoint import Checkpoint, open_checkpoint

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (tensors read, tensors in all)
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """A model, the assets its text side needs (see ``Checkpoint``), and its config."""

    model: Decoder
    assets: dict[str, bytes]
    config: ModelConfig


def load_model(
    path: str | Path,
    device: str = "cpu",
    weights: str = "float16",
    threads: int | None = None,
    attention: str | None = None,
    progress: Progress | None = None,
    name: str | None = None,
) -> LoadedModel:
    """Open ``path`` (a Hugging Face folder or a .gguf file) and make it ready to run.

    ``weights``: ``float16`` (packed, arithmetic in float32) or ``float32``. ``threads``: CPU threads, all cores if
    None. ``attention``: ``numba``, ``torch``, or None for numba where it is installed. ``name``: how the model is
    announced, the file's or folder's name if None. Raises ``CheckpointError`` for a checkpoint that cannot be served
    correctly and ``ValueError`` for an unknown option.
    """
    if device != "cpu":
        raise ValueError(f"device {device!r}: only 'cpu' is implemented")
    path = Path(path)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    count = threads or os.cpu_count() or 1
    torch.set_num_threads(count)
    backend = make_backend(config, rope_table(config.rope, config.head_dim, config.context_length), weights, count, attention)
    model = _build(checkpoint, backend, name or (path.stem if path.suffix == ".gguf" else path.resolve().name), progress)
    return LoadedModel(model, checkpoint.assets, config)


def _build(checkpoint: Checkpoint, backend: CpuBackend, name: str, progress: Progress | None) -> Decoder:
    config = checkpoint.config
    parts: dict[str, torch.Tensor] = {}
    layers: list[DecoderLayer | None] = [None] * config.num_layers
    pending: dict[int, dict[str, torch.Tensor]] = {}
    wanted = set(layer_shapes(config))
    for parameter, tensor in _counted(checkpoint, progress):
        match = _LAYER.fullmatch(parameter)
        if match is None:
            parts[parameter] = backend.keep(tensor) if parameter == EMBEDDING else tensor
            if parameter == HEAD or (parameter == EMBEDDING and config.tie_embeddings):
                head = backend.linear(tensor)
            continue
        index = int(match[1])
        layer = pending.setdefault(index, {})
        layer[match[2]] = tensor
        if set(layer) == wanted:  # packed as soon as complete, so the unpacked model is never whole in memory
            layers[index] = _layer(pending.pop(index), backend)
    complete = [layer for layer in layers if layer is not None]
    numerics = backend.finish()
    facts = ModelFacts(
        name=name,
        architecture=_ARCHITECTURES[config.family],
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        num_layers=config.num_layers,
        kv_bytes_per_token=2 * config.num_layers * config.kv_size * 4,
        eos_token_ids=config.eos_token_ids,
        fingerprint=checkpoint.fingerprint,
        numerics=hashlib.sha256(f"{checkpoint.fingerprint} {numerics}".encode()).hexdigest(),
    )
    log.info("%s: %s; %s", name, checkpoint.fingerprint[:12], numerics)
    return Decoder(
        config, facts, backend.ops, parts[EMBEDDING], complete, parts[FINAL_NORM].float(), head, backend.row_tile
    )


def _layer(parts: dict[str, torch.Tensor], backend: CpuBackend) -> DecoderLayer:
    def fused(*names: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return backend.linear(torch.cat([parts[f"{name}.weight"].float() for name in names]))

    return DecoderLayer(
        input_norm=parts["input_layernorm.weight"].float(),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=fused("self_attn.o_proj"),
        post_norm=parts["post_attention_layernorm.weight"].float(),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )


def _counted(checkpoint: Checkpoint, progress: Progress | None) -> Iterator[tuple[str, torch.Tensor]]:
    total = len(parameter_shapes(checkpoint.config))
    for done, item in enumerate(checkpoint.tensors(), 1):
        yield item
        if progress is not None:
            progress(done, total)
