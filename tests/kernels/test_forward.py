"""Whole forward passes with the kernels behind the interpreter give the CPU backend's logits, family by family."""

from __future__ import annotations

import pytest
import torch

from executor_svc.backends.cuda.build import CudaBuilder
from executor_svc.models.config import ModelConfig
from executor_svc.models.rope import rope_table
from tests.kernels.backends import make_device
from tests.kernels.stand_in import NoHostReads
from tests.kernels.tiny_models import (
    BLOCK_SIZE,
    EXPERTS,
    GEMMA,
    LLAMA,
    MIXTRAL,
    NUM_BLOCKS,
    QWEN3_MOE,
    Batch,
    cpu_model,
    cuda_model,
)

pytestmark = pytest.mark.nvrtc

# Of the largest logit. Float32: another order of sums. The others round every activation, too.
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        pytest.param(LLAMA, "float32", id="llama-float32"),
        pytest.param(LLAMA, "bfloat16", id="llama-bfloat16"),
        pytest.param(GEMMA, "float32", id="gemma-float32"),
        pytest.param(GEMMA, "bfloat16", id="gemma-bfloat16"),
        pytest.param(EXPERTS, "float16", id="experts-float16"),
        pytest.param(MIXTRAL, "bfloat16", id="mixtral-bfloat16"),
        pytest.param(QWEN3_MOE, "float32", id="qwen3-moe-float32"),
    ],
)
def test_logits_equal_the_cpu(config: ModelConfig, weights: str) -> None:
    """Prompts in chunks, mixed steps, decode; caches full of NaN at the start; nothing waits for the device."""
    device = make_device()
    expected, model = cpu_model(config, weights), cuda_model(config, device, weights)
    batch = Batch(3, config.vocab_size)
    for rows, new in (([0, 1], [3, 34]), ([0, 2, 1], [1, 5, 9]), ([0, 1, 2], [1, 1, 1])):
        metadata = batch.advance(rows, new)
        ids = torch.from_numpy(metadata.input_ids)
        on_device = ids.to(device.launcher.device)
        with NoHostReads():
            logits = model.forward(on_device, metadata)
        logits, right = logits.cpu(), expected.forward(ids, metadata)
        assert logits.dtype == torch.float32
        error = float((logits - right).abs().max() / right.abs().max())
        assert error < TOLERANCE[weights], error
        if weights == "float32":
            assert torch.equal(logits.argmax(dim=1), right.argmax(dim=1))


def test_a_step_without_logits_has_none() -> None:
    import dataclasses

    import numpy as np

    model = cuda_model(LLAMA, make_device(), "bfloat16")
    metadata = Batch(1, 96).advance([0], [5])
    metadata = dataclasses.replace(metadata, logit_indices=np.zeros(0, np.int64), logit_rows=np.zeros(0, np.int32))
    logits = model.forward(torch.zeros(5, dtype=torch.int64, device=model.device.launcher.device), metadata)
    assert logits.shape == (0, 96)


def test_what_does_not_fit_is_refused() -> None:
    device = make_device()
    ops = cuda_model(LLAMA, device).ops
    with pytest.raises(ValueError, match="block size 8"):
        ops.allocate_kv_cache(4, 8)
    ops.allocate_kv_cache(4, BLOCK_SIZE)
    batch = Batch(1, 96)
    with pytest.raises(ValueError, match="blocks that a cache of 4 does not have"):
        ops.begin_step(batch.advance([0], [5]))
    short = CudaBuilder(LLAMA, rope_table(LLAMA.rope, 64, 32), "float32", device)._ops
    short.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    with pytest.raises(ValueError, match="beyond the context of 32"):
        short.begin_step(batch.advance([0], [40]))


def test_models_the_kernels_cannot_run_are_refused_by_name() -> None:
    import dataclasses

    device = make_device()
    rope = rope_table(LLAMA.rope, 64, 32)
    for field, value, message in (
        ("head_dim", 48, "head size 48"),
        ("num_heads", 34, "34 query heads over 2"),
        ("hidden_size", 60, "hidden size 60"),
        ("intermediate_size", 100, "intermediate size 100"),
    ):
        with pytest.raises(ValueError, match=message):
            CudaBuilder(dataclasses.replace(LLAMA, **{field: value}), rope, "bfloat16", device)
    for field, value, message in (
        ("expert_intermediate_size", 36, "intermediate size of an expert 36"),
        ("experts_per_token", 33, "33 of 40 experts a token; at most 32 of 2048"),
        ("activation", "gelu_tanh", "experts with activation 'gelu_tanh'"),
        ("mlp_bias", True, "or biases"),
    ):
        config = dataclasses.replace(MIXTRAL, num_experts=40, **{field: value})
        with pytest.raises(ValueError, match=message):
            CudaBuilder(config, rope, "bfloat16", device)
    with pytest.raises(ValueError, match="weights 'int8'"):
        CudaBuilder(LLAMA, rope, "int8", device)
