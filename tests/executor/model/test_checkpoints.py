"""Formats agree, and whatever is damaged or unsupported is refused by name, quickly."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.models.load import load_model
from executor_svc.weights.checkpoint import open_checkpoint
from executor_svc.weights.errors import CheckpointError
from tests.executor.model.batch import Sequence, run
from tests.executor.model.gguf_writer import write_gguf
from tests.executor.model.tiny import make_tiny_llama


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refuse(path: Path, *words: str) -> None:
    """Opening and reading every tensor ends in a CheckpointError that names the fault, within seconds."""
    start = time.process_time()
    with pytest.raises(CheckpointError) as error:
        for _ in open_checkpoint(path).tensors():
            pass
    assert time.process_time() - start < 10
    for word in words:
        assert word in str(error.value)


def greedy(path: Path, weights: str = "float32") -> list[int]:
    model = load_model(path, weights=weights, attention="torch", threads=1).model
    model.allocate_kv_cache(8, 16)
    sequence = Sequence([5, 17, 200, 31], list(range(8)))
    logits = run(model, [(sequence, 4)], 16, every_logit=False)
    for _ in range(30):
        sequence.ids.append(int(logits[0].argmax()))
        logits = run(model, [(sequence, 1)], 16, every_logit=False)
    return sequence.ids


def test_gguf_and_folder_of_the_same_weights_agree(tiny: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tiny, tmp_path / "tiny.gguf", "F32")
    folder, file = open_checkpoint(tiny), open_checkpoint(gguf)
    assert file.config == folder.config
    expected = dict(folder.tensors())
    for name, tensor in file.tensors():
        assert torch.equal(tensor, expected.pop(name)), name
    assert not expected
    assert greedy(gguf) == greedy(tiny)
    from tokenizers import Tokenizer

    a, b = (Tokenizer.from_str(c.assets["tokenizer.json"].decode()) for c in (folder, file))
    for text in ("The quick brown fox, 1234!", " 東京 🙂\n\n<|im_start|>user\nhi<|im_end|>", "naïve  café\t"):
        assert a.encode(text).ids == b.encode(text).ids
        assert b.decode(b.encode(text).ids, skip_special_tokens=False) == text
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert folder.assets[name] == file.assets[name], name


@pytest.mark.parametrize(
    ("kind", "error"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 8e-3), ("Q4_1", 0.11), ("Q4_0", 0.2)]
)
def test_quantised_gguf(tiny: Path, tmp_path: Path, kind: str, error: float) -> None:
    gguf = write_gguf(tiny, tmp_path / "q.gguf", kind)
    expected = dict(open_checkpoint(tiny).tensors())
    for name, tensor in open_checkpoint(gguf).tensors():
        scale = float(expected[name].abs().max())
        assert float((tensor.float() - expected[name]).abs().max()) <= error * scale, name


def test_sharded_and_half_precision_folders(copy: Path) -> None:
    expected = greedy(copy, "float16")
    tensors = {name: t.half() if t.ndim == 2 else t for name, t in load_file(copy / "model.safetensors").items()}
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in shards.items():
        save_file({name: tensors[name] for name in inside}, copy / file)
    (copy / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, inside in shards.items() for name in inside}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert greedy(copy, "float16") == expected
    index["weight_map"].pop(names[0])
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(copy, "a.safetensors", names[0])
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    refuse(copy, "../model.safetensors")


def test_end_of_turn_is_an_end_of_sequence(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.7, "top_p": 0.9}))
    checkpoint = open_checkpoint(edit_config(copy, eos_token_id=0))
    assert checkpoint.config.eos_token_ids == (0, 2)
    stated = json.loads(checkpoint.assets["generation_config.json"])
    assert stated["eos_token_id"] == [0, 2]
    assert (stated["temperature"], stated["top_p"]) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "architecture"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "bias"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 4.0}}, "proportional"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 3.0}}, "alpha"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"num_key_value_heads": 3}, "3"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"eos_token_id": 99999}, "99999"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"intermediate_size": 97}, "mlp"),
        ({"tie_word_embeddings": False}, "lm_head"),
    ],
)
def test_unsupported_configs_are_refused_by_name(copy: Path, changes: dict[str, Any], word: str) -> None:
    refuse(edit_config(copy, **changes), word)


def test_wrong_tensors_are_refused_by_name(copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, file)
    refuse(copy, "q_norm")
    save_file({n: t for n, t in tensors.items() if n != "model.norm.weight"}, file)
    refuse(copy, "model.norm.weight")
    save_file(tensors | {"model.norm.weight": torch.ones(65)}, file)
    refuse(copy, "model.norm.weight", "65")
    save_file(tensors | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, file)
    refuse(copy, "model.norm.weight", "int8")
    save_file(tensors | {"lm_head.weight": torch.ones(384, 64)}, file)
    refuse(copy, "lm_head.weight")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert sum(1 for _ in open_checkpoint(copy).tensors()) == len(tensors)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "absent", "absent")
    refuse(tmp_path, "config.json")
    (tmp_path / "model.bin").write_bytes(b"x")
    refuse(tmp_path / "model.bin", "model.bin")
    make_tiny_llama(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    refuse(tmp_path / "pickled", "pytorch_model.bin")


def test_real_checkpoint(real_model: Path) -> None:
    checkpoint = open_checkpoint(real_model)
    assert checkpoint.config.eos_token_ids == (2,)
    assert set(checkpoint.assets) == {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"
    }  # fmt: skip
    reference = json.loads((Path(__file__).parent / "reference" / "smollm2.json").read_text())
    assert checkpoint.fingerprint == reference["fingerprint"]
