"""Models that the tests of this folder share. Compiled code is cached in the user's cache folder between runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.models.load import load_model
from tests.executor.model.tiny import make_tiny_llama

REAL_MODEL = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def real_model() -> Path:
    if not REAL_MODEL.is_file():
        pytest.skip(f"{REAL_MODEL.name} is not in models/")
    return REAL_MODEL


@pytest.fixture(scope="session")
def load() -> Callable[..., Any]:
    """``load(path, weights, attention, threads, blocks, block_size)``: a model with a NaN-filled cache."""

    @cache
    def loaded(path: Path, weights: str, attention: str, threads: int) -> Any:
        return load_model(path, weights=weights, attention=attention, threads=threads).model

    def with_cache(
        path: Path, weights: str, attention: str, threads: int = 0, blocks: int = 256, block_size: int = 16
    ) -> Any:
        # torch's own thread team stalls at every barrier when the machine is busy; tests ask for it where they need it.
        threads = threads or (1 if attention == "torch" else 2)
        model = loaded(path, weights, attention, threads)
        torch.set_num_threads(threads)
        model.allocate_kv_cache(blocks, block_size)
        for tensor in model.kv_tensors():
            tensor.fill_(float("nan"))
        return model

    return with_cache
