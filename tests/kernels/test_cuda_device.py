"""``CudaDevice`` without a device: what it asks of torch, and what a machine that has none answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor_svc.backends.cuda import device as devices
from executor_svc.backends.cuda.device import CudaDevice, open_device
from executor_svc.errors import DeviceUnavailable
from executor_svc.kernels import nvrtc


@pytest.fixture
def matmul(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Torch as on a device; the flags of its products are put back."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda value: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: SimpleNamespace(index=index))
    monkeypatch.setattr(devices, "CupyLauncher", lambda index: SimpleNamespace(device="cuda"))
    yield flags
    flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = before


def test_products_add_in_float32(matmul: Any) -> None:
    CudaDevice()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
    assert torch.get_float32_matmul_precision() == "highest"


def test_graphs_are_captured_and_replayed_in_inference_mode_on_the_devices_stream(
    matmul: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that torch keeps for all graphs is made at the first capture: made in inference mode, it cannot be written
    outside. And the products' workspaces belong to a stream."""
    asked: list[Any] = []

    class Graph:
        def replay(self) -> None:
            asked.append(("replay", torch.is_inference_mode_enabled()))

    @contextlib.contextmanager
    def capturing(graph: Graph, pool: Any, stream: Any) -> Iterator[None]:
        asked.append((pool, stream, torch.is_inference_mode_enabled()))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    device = CudaDevice()
    pool = device.graph_pool()
    assert pool is not device.graph_pool()
    replay = device.capture(lambda: asked.append("run"), pool)
    replay()
    assert asked == [(pool, device._stream, True), "run", ("replay", True)]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ImportError("No module named 'cupy'"), "cupy cannot be used (No module named 'cupy'); install the extra"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "CUDA error: out of memory"),
        (RuntimeError(), "RuntimeError"),
        (ValueError("compute capability 7.5 is below 8.0"), "compute capability 7.5 is below 8.0"),
        (nvrtc.NvrtcUnavailable("NVRTC 13.0 is not installed"), "NVRTC 13.0 is not installed; install the extra"),
    ],
)
def test_why_a_device_cannot_be_used_is_one_line(error: Exception, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> CudaDevice:
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(devices, "CudaDevice", fail)
    with pytest.raises(DeviceUnavailable) as caught:
        open_device()
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
