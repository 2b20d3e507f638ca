"""A whole forward pass with the kernels behind the interpreter gives the CPU operations' logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor_svc.backends.cpu.build import TorchBuilder
from executor_svc.kernels.ops import KernelOps
from executor_svc.metadata import StepMetadata
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.rope import rope_table
from tests.kernels.backends import make_launcher

pytestmark = pytest.mark.nvrtc

CONFIG = ModelConfig(
    family="llama", vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, context_length=256, rms_norm_eps=1e-5, tie_embeddings=False,
)  # fmt: skip
BLOCK_SIZE, NUM_BLOCKS = 16, 24


def _model() -> Decoder:
    """Random weights, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    c = CONFIG

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    builder = TorchBuilder(c, rope_table(c.rope, c.head_dim, c.context_length), "float32", 1)
    builder.set_embedding(randn(c.vocab_size, c.hidden_size) * 8)
    builder.set_head(randn(c.vocab_size, c.hidden_size))
    builder.set_final_norm(1 + randn(c.hidden_size))
    for layer in range(c.num_layers):
        builder.set_layer(
            layer,
            {
                "input_layernorm.weight": 1 + randn(c.hidden_size),
                "post_attention_layernorm.weight": 1 + randn(c.hidden_size),
                "self_attn.q_proj.weight": randn(c.q_size, c.hidden_size) * 2,
                "self_attn.k_proj.weight": randn(c.kv_size, c.hidden_size) * 2,
                "self_attn.v_proj.weight": randn(c.kv_size, c.hidden_size),
                "self_attn.o_proj.weight": randn(c.hidden_size, c.q_size),
                "mlp.gate_proj.weight": randn(c.intermediate_size, c.hidden_size),
                "mlp.up_proj.weight": randn(c.intermediate_size, c.hidden_size),
                "mlp.down_proj.weight": randn(c.hidden_size, c.intermediate_size),
            },
        )
    builder.numerics()
    facts = ModelFacts("tiny", "llama", c.vocab_size, c.context_length, c.num_layers, 0, (), "", "")
    return builder.build(facts)


class _Batch:
    """Rows of (past, new tokens) over shuffled blocks; ``advance`` is one step's metadata."""

    def __init__(self, rows: int) -> None:
        self._random = np.random.default_rng(1)
        self._blocks = self._random.permutation(NUM_BLOCKS).reshape(rows, -1).astype(np.int32)
        self._lens = np.zeros(rows, np.int32)

    def advance(self, rows: list[int], new: list[int]) -> StepMetadata:
        lens = np.array(new, np.int32)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        past = self._lens[rows].copy()
        positions = np.concatenate([np.arange(p, p + n) for p, n in zip(past, lens, strict=True)])
        row_of = np.repeat(np.arange(len(rows)), lens)
        tables = self._blocks[rows]
        self._lens[rows] += lens
        return StepMetadata(
            input_ids=self._random.integers(0, CONFIG.vocab_size, int(starts[-1])),
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


def test_logits_equal_the_cpu() -> None:
    """Prefill in chunks, mixed steps, decode; float32, caches full of NaN at the start."""
    expected, model = _model(), _model()
    rope = rope_table(CONFIG.rope, CONFIG.head_dim, CONFIG.context_length)
    model.ops = KernelOps(make_launcher(), CONFIG, rope, torch.float32)
    for each in (expected, model):
        each.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
        for tensor in each.ops.kv_tensors():
            tensor.fill_(torch.nan)
    batch = _Batch(3)
    for rows, new in (([0, 1], [5, 40]), ([0, 2, 1], [1, 17, 30]), ([0, 1, 2], [1, 1, 1])):
        metadata = batch.advance(rows, new)
        ids = torch.from_numpy(metadata.input_ids)
        logits, right = model.forward(ids, metadata), expected.forward(ids, metadata)
        torch.testing.assert_close(logits, right, atol=2e-5, rtol=1e-5)
        assert torch.equal(logits.argmax(dim=1), right.argmax(dim=1))


def test_what_does_not_fit_is_refused() -> None:
    rope = rope_table(CONFIG.rope, CONFIG.head_dim, 32)
    ops = KernelOps(make_launcher(), CONFIG, rope, torch.float32)
    with pytest.raises(ValueError, match="block size 8"):
        ops.allocate_kv_cache(4, 8)
    ops.allocate_kv_cache(4, BLOCK_SIZE)
    batch = _Batch(1)
    with pytest.raises(ValueError, match="blocks that a cache of 4 does not have"):
        ops.begin_step(batch.advance([0], [5]))
    ops.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    with pytest.raises(ValueError, match="beyond the context of 32"):
        ops.begin_step(batch.advance([0], [40]))
