"""The compiled forward with every named difference at once: against plain torch, and bit for bit against itself in
other register tiles, threads, chunks and company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.backends.cpu.build import make_builder
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig, RopeConfig
from executor_svc.models.parameters import layer_shapes
from executor_svc.models.rope import rope_table
from tests.executor.model.batch import Sequence, run
from tests.executor.model.families import random_ids

pytest.importorskip("numba")
pytestmark = pytest.mark.timeout(600)  # two compilations, of a minute each on a busy machine
TOLERANCES = {"float32": 1e-4, "float16": 0.02}  # by the KV cache's type, of logits within -5..5

CONFIG = ModelConfig(
    family="llama",
    vocab_size=384,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    context_length=512,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    rope=RopeConfig(rotary_dim=16),
    local_rope=RopeConfig(theta=100.0, rotary_dim=16),
    activation="gelu_tanh",
    windows=(0, 21, 100, 21),
    qkv_bias=True,
    output_bias=True,
    qk_norm=True,
    sandwich_norms=True,
    embedding_scale=8.0,
    attention_scale=0.3,
    attention_softcap=4.0,
    final_softcap=5.0,
    num_experts=5,
    experts_per_token=2,
    expert_intermediate_size=48,
    normalize_experts=False,
    dense_layers=(1,),
)


def make_model(attention: str, threads: int = 2, kv_type: str = "float32", config: ModelConfig = CONFIG) -> Any:
    """Random weights, the same at every call, and a NaN-filled cache."""
    generator = torch.Generator().manual_seed(3)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        value = torch.randn(shape, generator=generator)
        return value * 0.15 if len(shape) == 2 else value * 0.2 + (1.0 if "norm" in name else 0.0)

    tables = [rope_table(rope, config.head_dim, 512) for rope in (config.rope, config.local_rope) if rope]
    builder = make_builder(config, tables[0], "float32", threads, attention, tables[1], kv_type)
    builder.set_embedding(tensor("embedding", (config.vocab_size, config.hidden_size)))
    builder.set_head(tensor("head", (config.vocab_size, config.hidden_size)))
    builder.set_final_norm(tensor("norm", (config.hidden_size,)))
    for index in range(config.num_layers):
        builder.set_layer(index, {name: tensor(name, shape) for name, shape in layer_shapes(config, index).items()})
    builder.numerics()
    model = builder.build(ModelFacts("all", "all", config.vocab_size, 512, config.num_layers, 0, (), "", ""))
    model.allocate_kv_cache(256, 16)
    for cache in model.kv_tensors():  # type: ignore[attr-defined]
        cache.fill_(float("nan"))
    return model


@pytest.fixture(scope="module", params=TOLERANCES)
def kv_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(kv_type: str) -> torch.Tensor:
    return logits_of(make_model("numba", kv_type=kv_type), 400)


def logits_of(model: Any, chunk: int, mates: int = 0) -> torch.Tensor:
    """Logits of every token of one text of 400, in chunks, beside ``mates`` rows that decode."""
    row = Sequence(random_ids(400, seed=1), list(range(25)))
    others = [Sequence(random_ids(150, seed=2 + i), list(range(30 + 10 * i, 40 + 10 * i))) for i in range(mates)]
    for i, other in enumerate(others):
        run(model, [(other, 40 + i)], 16)
    while row.length < 400:
        decoding = [(other, 1) for other in others if other.length < 150]
        count = min(chunk, 400 - row.length)
        run(model, [(row, 1), *decoding] if count == 1 else [*decoding, (row, count)], 16)
    return torch.cat(row.logits)


def test_it_equals_plain_torch(expected: torch.Tensor, kv_type: str) -> None:
    plain = logits_of(make_model("torch", threads=1), 400)
    torch.testing.assert_close(plain, expected, atol=TOLERANCES[kv_type], rtol=0)
    assert kv_type == "float32" or not torch.allclose(plain, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("chunk", "mates", "threads"), [(399, 0, 1), (37, 12, 2), (1, 3, 2)])
def test_chunks_company_and_threads_do_not_change_bits(
    expected: torch.Tensor, kv_type: str, chunk: int, mates: int, threads: int
) -> None:
    assert torch.equal(logits_of(make_model("numba", threads, kv_type), chunk, mates), expected)


def test_avx2_code_gives_the_same_bits(expected: torch.Tensor, kv_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from executor_svc.backends.cpu.native import decoder

    load_forward: Callable[..., Any] = decoder.load_forward
    monkeypatch.setattr(decoder, "load_forward", lambda *types: load_forward(*types, avx512=False))
    model = make_model("numba", kv_type=kv_type)
    assert torch.equal(logits_of(model, 400), expected)
    assert torch.equal(logits_of(model, 37, 12), expected)


def test_pages_before_the_window_are_not_read() -> None:
    """Where every layer has a window, what lies wholly before it may hold anything."""
    import dataclasses

    model = make_model("numba", config=dataclasses.replace(CONFIG, windows=(21,) * 4))
    ids = random_ids(200, seed=1)
    row, same = Sequence(ids, list(range(13))), Sequence(ids, list(range(13)))
    run(model, [(row, 199)], 16)
    same.length = 199
    usual = run(model, [(row, 1)], 16)
    first = (199 - 21) // 16  # block of the first token that is seen
    for cache in model.kv_tensors():
        cache.view(256, -1)[:first] = float("nan")
    poisoned = run(model, [(same, 1)], 16)
    assert np.isfinite(usual.numpy()).all()
    assert torch.equal(usual, poisoned)
