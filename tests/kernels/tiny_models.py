"""Tiny random models for both back ends, and batches that advance over shuffled blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from executor_svc.backends.cpu.build import TorchBuilder
from executor_svc.backends.cuda.build import WEIGHTS, CudaBuilder
from executor_svc.backends.cuda.decoder import CudaDecoder
from executor_svc.backends.cuda.device import Device
from executor_svc.metadata import StepMetadata
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig, RopeConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.parameters import layer_shapes
from executor_svc.models.rope import rope_table

BLOCK_SIZE, NUM_BLOCKS = 16, 24


def _config(**differences: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "family": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "context_length": 256, "rms_norm_eps": 1e-5,
        "tie_embeddings": False,
    }  # fmt: skip
    return ModelConfig(**(sizes | differences))


LLAMA = _config()
GEMMA = _config(
    windows=(20, 0), local_rope=RopeConfig(theta=1000.0), qk_norm=True, sandwich_norms=True, activation="gelu_tanh",
    attention_scale=0.2, attention_softcap=2.0, final_softcap=5.0, embedding_scale=1.5, tie_embeddings=True,
)  # fmt: skip
EXPERTS = _config(
    num_experts=8, experts_per_token=2, expert_intermediate_size=32, dense_layers=(0,), qkv_bias=True,
    rope=RopeConfig(rotary_dim=32),
)  # fmt: skip
MIXTRAL = _config(num_experts=8, experts_per_token=2, expert_intermediate_size=96)
QWEN3_MOE = _config(
    num_experts=32, experts_per_token=4, expert_intermediate_size=24, normalize_experts=False, qk_norm=True,
)  # fmt: skip


def _parameters(config: ModelConfig, weights: str) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Random, the same at every call, and such that ``weights`` holds them exactly."""
    generator = torch.Generator().manual_seed(0)

    def random(name: str, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5 * scale
        values = 1 + values if "norm" in name else values
        return values.to(WEIGHTS[weights]).float()

    hidden = config.hidden_size
    outside = {
        "embedding": random("embedding", (config.vocab_size, hidden), 8.0),
        "head": random("head", (config.vocab_size, hidden)),
        "norm": random("norm", (hidden,)),
    }
    layers = [
        {
            name: random(name, shape, 2.0 if "q_proj.w" in name or "k_proj.w" in name else 1.0)
            for name, shape in layer_shapes(config, layer).items()
        }
        for layer in range(config.num_layers)
    ]
    return outside, layers


def _tables(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    local = config.local_rope
    size = (config.head_dim, config.context_length)
    return rope_table(config.rope, *size), None if local is None else rope_table(local, *size)


def _facts(config: ModelConfig) -> ModelFacts:
    return ModelFacts("tiny", "llama", config.vocab_size, config.context_length, config.num_layers, 0, (), "", "")


def _fill(builder: Any, config: ModelConfig, weights: str) -> None:
    outside, layers = _parameters(config, weights)
    builder.set_embedding(outside["embedding"])
    builder.set_head(outside["embedding" if config.tie_embeddings else "head"])
    builder.set_final_norm(outside["norm"])
    for index, parts in enumerate(layers):
        builder.set_layer(index, parts)
    builder.numerics()


def cpu_model(config: ModelConfig, weights: str = "float32") -> Decoder:
    """float32 arithmetic over weights that ``weights`` holds; its cache is full of NaN."""
    rope, local = _tables(config)
    builder = TorchBuilder(config, rope, "float32", 1, local)
    _fill(builder, config, weights)
    model = builder.build(_facts(config))
    model.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    for tensor in model.kv_tensors():
        tensor.fill_(torch.nan)
    return model


def cuda_model(config: ModelConfig, device: Device, weights: str = "float32") -> CudaDecoder:
    rope, local = _tables(config)
    builder = CudaBuilder(config, rope, weights, device, local)
    _fill(builder, config, weights)
    model = builder.build(_facts(config))
    model.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    for tensor in model.kv_tensors():
        tensor.fill_(torch.nan)
    return model


class Batch:
    """``advance`` is one step's metadata, for rows that go on where they were."""

    def __init__(self, rows: int, vocab: int) -> None:
        self._random = np.random.default_rng(1)
        self._vocab = vocab
        self._blocks = self._random.permutation(NUM_BLOCKS)[: NUM_BLOCKS // rows * rows].reshape(rows, -1)
        self._lens = np.zeros(rows, np.int32)

    def advance(self, rows: list[int], new: list[int]) -> StepMetadata:
        """Decode rows (one new token) first."""
        lens = np.array(new, np.int32)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        past = self._lens[rows].copy()
        positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, lens, strict=True)])
        row_of = np.repeat(np.arange(len(rows)), lens)
        tables = self._blocks[rows].astype(np.int32)
        self._lens[rows] += lens
        return StepMetadata(
            input_ids=self._random.integers(0, self._vocab, int(starts[-1])),
            positions=positions.astype(np.int64),
            slots=np.array(rows, np.int32),
            seq_lens=past,
            query_lens=lens,
            query_starts=starts,
            block_tables=tables,
            kv_slots=tables[row_of, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
            logit_indices=np.arange(int(starts[-1])),
            logit_rows=row_of.astype(np.int32),
            num_decode_rows=sum(n == 1 for n in new),
        )
