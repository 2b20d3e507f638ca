"""Rope types: tables and logits equal ``transformers``, within the original context and beyond it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.models.config import RopeConfig
from executor_svc.models.hf_config import parse_hf_config
from executor_svc.models.load import load_model
from executor_svc.models.rope import rope_table, table_digest
from executor_svc.weights.checkpoint import open_checkpoint
from executor_svc.weights.errors import CheckpointError
from tests.executor.model.batch import Sequence, run
from tests.executor.model.families import (
    TOLERANCE,
    random_ids,
    reference_logits,
    reference_logits_by_token,
)
from tests.executor.model.tiny import make_tiny_model

ORIGINAL = 64  # tokens; the models below are for 256
LENGTH = 100
SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [1.0 + 1.5 * i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT, "long_factor": LONG}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-stated": {**YARN, "attention_factor": 1.3, "truncate": False},
}  # fmt: skip


def make(folder: Path, rope: str) -> Path:
    stated = ORIGINAL if rope == "dynamic" else 256
    return make_tiny_model("Llama", folder, max_position_embeddings=stated, rope_parameters=dict(ROPES[rope]))


def make_longrope(folder: Path, **rope: Any) -> Path:
    return make_tiny_model(
        "Phi3",
        folder,
        max_position_embeddings=256,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={**LONGROPE, **rope},
    )


@pytest.mark.parametrize("rope", ROPES)
def test_tables_equal_transformers(rope: str) -> None:
    """cos and sin of every position of the stretched context; ``dynamic`` is asked for one length after another."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    stated = ORIGINAL if rope == "dynamic" else 256
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], head_dim=16, max_position_embeddings=stated, rope_parameters=ROPES[rope]
    )
    parsed = parse_hf_config(config.to_dict())
    assert parsed.context_length == 256
    reference = LlamaRotaryEmbedding(config)
    positions = torch.arange(256)[None]
    steps = positions.split(1, dim=1) if rope == "dynamic" else [positions]
    rows = [torch.stack(reference(torch.zeros(1), step)) for step in steps]  # [cos and sin, 1, positions, head_dim]
    cos, sin = torch.cat(rows, dim=2)[:, 0, :, :8]
    table = rope_table(parsed.rope, 16, 256)
    torch.testing.assert_close(table, torch.cat([cos, sin], dim=1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("rope", "attention"), [*((rope, "numba") for rope in ROPES), ("dynamic", "torch"), ("yarn", "torch")]
)
def test_logits_within_and_beyond_the_original_context(tmp_path: Path, load: Any, rope: str, attention: str) -> None:
    """Prefill across the original context's end, then decode; all that differs is the table, for both ways. The
    reference is fed token by token for ``dynamic``: fed at once, it would turn the first keys by what suits the
    whole."""
    folder = make(tmp_path / "m", rope)
    ids = random_ids(LENGTH, seed=3)
    model = load(folder, "float32", attention)
    sequence = Sequence(ids, list(range(20, 27)))
    for count in (50, 42, *[1] * 8):
        run(model, [(sequence, count)], 16)
    expected = (reference_logits_by_token if rope == "dynamic" else reference_logits)(folder, ids)
    torch.testing.assert_close(torch.cat(sequence.logits), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("context", "length", "settings"),
    [
        (None, LENGTH, {}),  # served beyond the original context: the long factors
        (ORIGINAL, ORIGINAL, {}),  # not beyond it: the short ones
        (None, LENGTH, {"partial_rotary_factor": 0.75, "short_factor": SHORT[:6], "long_factor": LONG[:6]}),
        (ORIGINAL, ORIGINAL, {"attention_factor": 1.4}),
    ],
)
def test_longrope_logits(tmp_path: Path, context: int | None, length: int, settings: dict[str, Any]) -> None:
    folder = make_longrope(tmp_path / "m", **settings)
    ids = random_ids(length, seed=4)
    model = load_model(folder, weights="float32", attention="torch", threads=1, context_length=context).model
    model.allocate_kv_cache(16, 16)
    sequence = Sequence(ids, list(range(16)))
    run(model, [(sequence, length - 5)], 16)
    for _ in range(5):
        run(model, [(sequence, 1)], 16)
    torch.testing.assert_close(torch.cat(sequence.logits), reference_logits(folder, ids), atol=TOLERANCE, rtol=0)


def test_the_served_context_chooses_the_factors(tmp_path: Path) -> None:
    """And with them the numerics: executors that chose otherwise do not continue each other's requests."""
    folder = make_longrope(tmp_path / "m")

    def facts(context: int | None) -> Any:
        return load_model(folder, weights="float32", attention="torch", threads=1, context_length=context).model.facts

    long, longer, short = facts(100), facts(None), facts(ORIGINAL)
    assert (short.context_length, long.context_length, longer.context_length) == (ORIGINAL, 100, 256)
    assert long.numerics == longer.numerics != short.numerics
    assert long.fingerprint == longer.fingerprint == short.fingerprint
    for wrong in (0, 257):
        with pytest.raises(ValueError, match=f"context length {wrong}: .* 1 to 256"):
            facts(wrong)


def test_an_absurd_context_is_not_served_unasked(tmp_path: Path) -> None:
    folder = make_tiny_model("Llama", tmp_path / "m", max_position_embeddings=2**31 - 1)
    with pytest.raises(CheckpointError, match=r"2147483647.*--context-length"):
        load_model(folder, weights="float32", attention="torch", threads=1)
    loaded = load_model(folder, weights="float32", attention="torch", threads=1, context_length=100)
    assert loaded.model.facts.context_length == loaded.config.context_length == 100


def test_a_row_depends_on_its_position_alone() -> None:
    """Tables of other lengths begin with the same rows, whatever the type: chunks and continuations rely on it."""
    for rope in ROPES.values():
        config = parse_hf_config(_config(rope)).rope
        assert torch.equal(rope_table(config, 16, 20000)[:300], rope_table(config, 16, 300))
    assert table_digest(rope_table(config, 16, 4000)) == table_digest(rope_table(config, 16, 2000))


def _config(rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": ORIGINAL, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_parameters": rope,
    } | changes  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_the_older_spelling_means_the_same(rope: str) -> None:
    newer = _config(dict(ROPES[rope]))
    scaling = dict(ROPES[rope])
    older = {k: v for k, v in newer.items() if k != "rope_parameters"} | {"rope_theta": scaling.pop("rope_theta")}
    kind = scaling.pop("rope_type")
    older["rope_scaling"] = None if kind == "default" else {"type": kind, **scaling}
    assert parse_hf_config(older) == parse_hf_config(newer)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_the_older_spellings_of_longrope(tmp_path: Path, kind: str) -> None:
    folder = make_longrope(tmp_path / "m")
    expected = open_checkpoint(folder).config
    assert (expected.rope.kind, expected.rope.original_context) == ("longrope", ORIGINAL)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": {"type": kind, "short_factor": SHORT, "long_factor": LONG}}
    path.write_text(json.dumps(config))
    assert open_checkpoint(folder).config == expected


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"rope_type": "proportional"}, "proportional"),
        ({"rope_type": ["yarn"]}, "yarn"),
        ({**YARN, "alpha": 1.0}, "alpha"),
        ({**YARN, "factor": "4"}, "factor"),
        ({**YARN, "factor": 0.5}, "factor 0.5"),
        ({**YARN, "rope_theta": -1.0}, "theta"),
        ({**YARN, "original_max_position_embeddings": 0}, "original"),
        ({**YARN, "beta_fast": float("nan")}, "beta_fast"),
        ({**YARN, "truncate": 1}, "truncate"),
        ({"rope_type": "dynamic", "factor": 1e300}, "factor"),
        ({"rope_type": "linear"}, "factor"),
        ({**ROPES["llama3"], "low_freq_factor": 4.0}, "low_freq_factor"),
        ({**LONGROPE, "short_factor": SHORT[:5]}, "short_factors: 5"),
        ({**LONGROPE, "long_factor": [0.0] * 8}, "long_factors"),
        ({**LONGROPE, "long_factor": "1"}, "long_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ("yarn", "rope_parameters"),
    ],
)
def test_ropes_are_refused_by_name(rope: Any, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        parse_hf_config(_config(rope))


def test_a_table_is_made_of_checked_values_only() -> None:
    for changes in ({"kind": "yarn"}, {"kind": "dynamic", "original_context": 64, "rotary_dim": 2}, {"rotary_dim": 18}):
        with pytest.raises(CheckpointError):
            RopeConfig(**changes).check(16)
