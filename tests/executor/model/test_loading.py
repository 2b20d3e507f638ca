"""Loading: memory at the peak, every parameter exactly once, progress, and what a model's fingerprints cover."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.models.hf_config import parse_hf_config
from executor_svc.models.load import load_model
from executor_svc.models.parameters import parameter_shapes
from executor_svc.weights.checkpoint import open_checkpoint
from tests.executor.model.gguf_writer import write_gguf

MAX_RATIO = 1.3
CHILD = """
import sys
from tests.executor.model.test_loading import anonymous_memory
from executor_svc.models.hf_config import parse_hf_config
from executor_svc.models.load import load_model
load = lambda path: load_model(path, weights=sys.argv[3], threads=1)
load(sys.argv[1])
print(anonymous_memory(), flush=True)
sys.stdin.readline()
model = load(sys.argv[2])
print(anonymous_memory(), flush=True)
sys.stdin.readline()
"""


def anonymous_memory(process: int | str = "self") -> int:
    """Bytes of a process's own memory: pages of mapped files, which the system may drop, are not in it. What malloc
    keeps though it is free is given back first, where the process is this one."""
    if process == "self":
        ctypes.CDLL(None).malloc_trim(0)
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_and_final(warm: Path, model: Path, weights: str) -> tuple[int, int]:
    """Bytes above those before loading: the most while it loads (looked at every millisecond), and when it is done."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(warm), str(model), weights],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        before = int(child.stdout.readline())
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(child.stdout.readline()))  # type: ignore[union-attr]
        child.stdin.write("\n")
        child.stdin.flush()
        reader.start()
        peak = 0
        while reader.is_alive():
            peak = max(peak, anonymous_memory(child.pid))
            time.sleep(0.001)
        return peak - before, int(lines[0]) - before
    finally:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def checkpoints(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random model of 50 million parameters in three forms: 200 MB as float32."""
    root = tmp_path_factory.mktemp("loading")
    whole = Path(shutil.copytree(tiny, root / "float32"))
    config = json.loads((whole / "config.json").read_text()) | {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 14,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    }  # fmt: skip
    (whole / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in parameter_shapes(parse_hf_config(config)).items()}
    save_file(tensors, whole / "model.safetensors")
    half = Path(shutil.copytree(whole, root / "float16"))
    save_file({name: t.half() if t.ndim == 2 else t for name, t in tensors.items()}, half / "model.safetensors")
    return {"float32": whole, "float16": half, "Q8_0": write_gguf(whole, root / "q8.gguf", "Q8_0")}


@pytest.mark.parametrize(("form", "weights"), [("float32", "float32"), ("float16", "float16"), ("Q8_0", "float16")])
def test_memory_at_the_peak(checkpoints: dict[str, Path], tiny: Path, form: str, weights: str) -> None:
    peak, final = peak_and_final(tiny, checkpoints[form], weights)
    config = open_checkpoint(checkpoints[form]).config
    elements = sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values())
    kept = elements * (2 if weights == "float16" else 4)  # at least: a tied head is kept twice
    assert kept < final < 1.5 * kept, (kept, final)
    assert peak <= MAX_RATIO * final, f"{peak} bytes at the peak, {final} in the end: {peak / final:.2f}"


def test_progress_counts_every_tensor(tiny: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(tiny, attention="torch", threads=1, progress=lambda done, total: seen.append((done, total)))
    total = len(parameter_shapes(open_checkpoint(tiny).config))
    assert seen == [(done, total) for done in range(1, total + 1)]


def facts(path: Path, **options: Any) -> tuple[str, str]:
    made = load_model(path, **{"weights": "float32", "attention": "torch", "threads": 1, **options}).model.facts
    return made.fingerprint, made.numerics


def test_fingerprints(tiny: Path, tmp_path: Path) -> None:
    """Weights, dtype and backend change the numerics; where the files are, and their dates and names, do not."""
    fingerprint, numerics = facts(tiny)
    copy = Path(shutil.copytree(tiny, tmp_path / "another-name"))
    os.utime(copy / "model.safetensors", (1, 1))
    assert facts(copy) == (fingerprint, numerics)
    assert facts(copy, name="served-as") == (fingerprint, numerics)
    file = write_gguf(tiny, tmp_path / "a.gguf", "F32")
    moved = Path(shutil.copy(file, tmp_path / "b.gguf"))
    assert facts(file) == facts(moved)

    half = facts(tiny, weights="float16")
    compiled = facts(tiny, attention="numba")
    assert half[0] == compiled[0] == fingerprint
    assert len({numerics, half[1], compiled[1]}) == 3

    tensors = load_file(copy / "model.safetensors")
    changed = tensors["model.layers.1.mlp.down_proj.weight"]
    changed[3, 5] = torch.nextafter(changed[3, 5], torch.tensor(9.0))  # one bit of one weight
    save_file(tensors, copy / "model.safetensors")
    other = facts(copy)
    assert other[0] != fingerprint
    assert other[1] != numerics
    shutil.copy(tiny / "model.safetensors", copy / "model.safetensors")
    assert facts(copy) == (fingerprint, numerics)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert facts(copy)[1] != numerics
