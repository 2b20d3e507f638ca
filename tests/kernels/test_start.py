"""Starting on a device: sizes from what was measured, graphs, and steps that take no memory beyond."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.backends.cuda.device import Memory
from executor_svc.backends.cuda.graphs import graph_sizes
from executor_svc.backends.cuda.memory import RESERVE, Measured, kv_blocks, room_for
from executor_svc.backends.cuda.runner import CudaRunner
from executor_svc.backends.cuda.start import StartSettings, start
from executor_svc.kv_memory import KvMemoryError
from executor_svc.models.base import ModelFacts
from executor_svc.slots import SlotLimits, Slots
from executor_svc.worker import Worker
from protos.step import StepResult
from tests.executor.scripted import Planner
from tests.kernels.backends import make_device
from tests.kernels.stand_in import StandIn
from tests.kernels.tiny_models import LLAMA, Batch, cuda_model

GIB = 1 << 30
FACTS = ModelFacts("m", "llama", 128_000, 8192, 32, 131_072, (), "", "")  # of 8B shapes: 2 MiB a block of 16


def _blocks(measured: Measured, fraction: float = 0.9, **asked: int) -> int:
    options: dict[str, Any] = {"kv_memory": None, "kv_blocks": None} | asked
    return kv_blocks(FACTS, 16, 256, measured, fraction, **options)


ROOMY = Measured(Memory(free=64 * GIB, total=80 * GIB), step=2 * GIB, graphs=GIB)


def test_blocks_are_what_the_fraction_leaves() -> None:
    room = 72 * GIB - 16 * GIB - 3 * GIB - RESERVE
    assert _blocks(ROOMY) == room // (2 << 20)
    assert _blocks(ROOMY, fraction=1.0) == (room + 8 * GIB) // (2 << 20)
    assert kv_blocks(FACTS, 16, 2, ROOMY, 0.9, None, None) == 2 * 512, "no more than all slots can fill"


def test_blocks_as_told() -> None:
    assert _blocks(ROOMY, kv_blocks=100) == 100
    assert _blocks(ROOMY, kv_memory=GIB) == 512
    assert _blocks(ROOMY, fraction=0.01, kv_blocks=100) == 100


def test_what_does_not_fit_says_why_in_numbers() -> None:
    full = Measured(Memory(free=4 * GIB, total=80 * GIB), step=2 * GIB, graphs=GIB)
    with pytest.raises(KvMemoryError) as caught:
        _blocks(full)
    text = str(caught.value)
    for part in ("80.00 GiB", "76.00 GiB in use", "2.00 GiB", "--gpu-memory-fraction 0.9", "--max-batch-tokens"):
        assert part in text
    assert "\n" not in text
    with pytest.raises(KvMemoryError, match=r"--kv-blocks 9999: 19.53 GiB of KV cache, but 0.50 GiB are left"):
        _blocks(full, kv_blocks=9999)
    with pytest.raises(KvMemoryError, match="less than one block"):
        _blocks(ROOMY, kv_memory=1000)


def test_a_device_that_is_full_says_so_in_one_line() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")
    with pytest.raises(MemoryError) as caught, room_for("the model's weights"):
        raise full
    assert str(caught.value) == (
        "the GPU has no room for the model's weights: CUDA out of memory. Tried to allocate 2.00 GiB."
    )


@pytest.mark.nvrtc
def test_a_step_that_does_not_fit_names_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

    model = cuda_model(LLAMA, make_device(), "bfloat16")
    settings = StartSettings(block_size=16, max_slots=4, max_batch_tokens=64, kv_blocks=12)
    with monkeypatch.context() as patch:
        patch.setattr(CudaRunner, "_forward", fail)
        with pytest.raises(
            KvMemoryError, match=r"a step of 64 tokens over 4 rows .* lower --max-batch-tokens"
        ) as caught:
            start(model, settings)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(type(model), "allocate_kv_cache", fail)
    with pytest.raises(MemoryError, match="no room for the buffers of a step, the KV cache and the graphs: CUDA out"):
        start(model, settings)


@pytest.mark.nvrtc
def test_graphs_never_read_inputs_that_moved() -> None:
    """A step that outgrows the reserve moves the inputs: an error, not the tokens of an older step."""
    model = cuda_model(LLAMA, make_device(), "bfloat16")
    last_tokens = torch.zeros(2, dtype=torch.int64, device=model.device.launcher.device)
    model.capture_graphs(last_tokens, 2)
    batch = Batch(2, 96)
    model.run(batch.advance([0, 1], [3, 3]), last_tokens)
    model.run(batch.advance([0, 1], [1, 1]), last_tokens)
    model.ops._staging.upload([np.zeros(1 << 20, np.uint64)])
    with pytest.raises(RuntimeError, match="larger than what was reserved"):
        model.run(batch.advance([0, 1], [1, 1]), last_tokens)
    model.capture_graphs(last_tokens, 2)
    model.run(batch.advance([0, 1], [1, 1]), last_tokens)


def test_graph_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(70) == [1, 2, 4, 8, 16, 32, 64, 70]
    assert graph_sizes(4096)[-1] == 256


class _Allocations(TorchDispatchMode):
    """Bytes of new memory that operations took."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(out, torch.Tensor) and (name.startswith(("empty", "zeros", "new_")) or name == "full"):
            self.bytes += out.numel() * out.element_size()
        return out


@pytest.mark.nvrtc
def test_start_and_flat_steps() -> None:
    """A start as the service does it; then the same step takes the same memory each time, and pinned memory none."""
    device = make_device()
    model = cuda_model(LLAMA, device, "bfloat16")
    runner, blocks = start(model, StartSettings(block_size=16, max_slots=4, max_batch_tokens=64, kv_blocks=12))
    assert blocks == 12
    assert model.kv_tensors()[0].shape[0] == 12
    sent: list[Any] = []
    worker = Worker(Slots(SlotLimits(12, 16, 4, 64, 96, 256)), runner, sent.append, overlap=True)
    planner = Planner()
    worker.begin_epoch(planner.epoch)
    admissions = [planner.admission(slot, [5, 6, slot], [slot, 8 + slot]) for slot in range(3)]
    worker.execute_plan(planner.plan(admitted=admissions, prefill=[(slot, 3) for slot in range(3)]))
    taken, alive = [], []
    pinned = device.pinned_bytes if isinstance(device, StandIn) else 0
    for step in range(6):
        counter = _Allocations()
        with counter:
            worker.execute_plan(planner.plan(decode=[0, 1, 2]))
        gc.collect()
        if step > 1:
            taken.append(counter.bytes)
            alive.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
    worker.finish_previous()
    assert [type(message) for message in sent] == [StepResult] * 7
    assert len(set(taken)) == 1
    assert len(set(alive)) == 1
    if isinstance(device, StandIn):
        assert device.replays == 6
        assert device.pinned_bytes == pinned


def test_importing_needs_no_cupy_and_no_device() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import executor_svc.backends.cuda.start, executor_svc.backends.cuda.runner, executor_svc.kernels.launch\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
