"""The launcher of the device without one: what it asks of CuPy, and that the CuPy installed here takes it."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.errors import DeviceUnavailable
from executor_svc.kernels import launch as launching
from executor_svc.kernels.launch import CupyLauncher
from executor_svc.kernels.signature import LaunchError
from executor_svc.kernels.table import find_kernel
from tests.kernels import backends
from tests.kernels.ptx.launcher import PtxLauncher


class _Cupy:
    """As much of CuPy as the launcher uses; keeps what it was asked."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.symbols: list[str] = []
        self.attributes: list[tuple[int, int, int]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.most_smem = 227 << 10
        self.cuda = SimpleNamespace(
            Device=lambda index: contextlib.nullcontext(),
            function=SimpleNamespace(Module=self._module),
            runtime=SimpleNamespace(
                cudaDevAttrMaxSharedMemoryPerBlockOptin=97,
                deviceGetAttribute=lambda number, index: self.most_smem if (number, index) == (97, 0) else 0,
            ),
        )
        self.driver = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9,
            funcSetAttribute=lambda *args: self.attributes.append(args),
        )  # fmt: skip

    def _module(self) -> Any:
        def get_function(symbol: str) -> Any:
            self.symbols.append(symbol)
            return function

        class Function:
            ptr = 77

            def __call__(_, grid: Any, block: Any, args: Any, shared_mem: int, stream: Any) -> None:
                self.calls.append((grid, block, args, shared_mem, stream.ptr))

        function = Function()
        return SimpleNamespace(load=self.images.append, get_function=get_function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> _Cupy:
    fake = _Cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api.driver", fake.driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(CupyLauncher, "device", "cpu")  # where this test's tensors are
    return fake


@pytest.mark.nvrtc
def test_a_launch_as_cupy_gets_it(cupy: _Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = CupyLauncher()
    assert launcher.num_multiprocessors == 132
    launch = launcher.kernel("gather_ids")
    assert launcher.kernel("gather_ids") is launch
    assert [image[:4] for image in cupy.images] == [b"\x7fELF"]
    assert cupy.attributes == [], "48 KB of shared memory are there without asking"
    ids, last, slots = torch.tensor([-1]), torch.tensor([7]), torch.zeros(1, dtype=torch.int32)
    for stream in (5, 6):  # whatever torch's current one is at the launch
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index, s=stream: SimpleNamespace(cuda_stream=s))
        launch((1,), (128,), (ids, last, slots, np.int32(1)))
    pointers = (ids.data_ptr(), last.data_ptr(), slots.data_ptr())
    assert cupy.calls == [((1,), (128,), (*pointers, 1), 0, stream) for stream in (5, 6)]
    assert [type(argument) for argument in cupy.calls[0][2]] == [int, int, int, np.int32]
    with pytest.raises(LaunchError, match="must be a numpy scalar"):
        launch((1,), (128,), (ids, last, slots, 1))  # type: ignore[arg-type]
    assert len(cupy.calls) == 2


@pytest.mark.nvrtc
def test_null_pointers_and_shared_memory(cupy: _Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=5))
    x = torch.zeros(1, 8)
    norm = CupyLauncher().kernel("add_rms_norm<f32>")
    norm((1,), (256,), (x, x, None, x, np.float32(1e-5), np.float32(0), np.int32(8)))
    assert cupy.calls[0][2][2] == 0
    name = "paged_decode<bf16, 128>"
    CupyLauncher().kernel(name)
    assert cupy.attributes == [(77, 8, find_kernel(name).max_smem), (77, 9, 100)]
    cupy.most_smem = 64 << 10
    with pytest.raises(DeviceUnavailable, match="128> needs 108800 bytes of shared memory a block, this GPU has 65536"):
        CupyLauncher().kernel(name)


@pytest.mark.nvrtc
def test_of_large_tensors_the_device_tests_copy_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: gigabytes that no test uses stay where they are."""
    monkeypatch.setattr(backends, "_LARGE", 64)
    monkeypatch.setattr(backends, "_TAIL", 16)
    ids, last, slots = torch.full((16,), -1), torch.tensor([7]), torch.zeros(16, dtype=torch.int32)
    gather = backends.MirrorLauncher(PtxLauncher(check_races=False)).kernel("gather_ids")
    gather((1,), (128,), (ids, last, slots, np.int32(16)))
    assert ids.tolist() == [-1] * 14 + [7, 7]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a launch of nothing: only where no driver would try it")
def test_the_real_cupy_takes_stream_and_arguments() -> None:
    """Arguments and stream are converted before the driver is asked, and it is the driver that is missing."""
    cupy = pytest.importorskip("cupy")
    function = cupy.cuda.function.Function.__new__(cupy.cuda.function.Function)
    good = (123456789012345, 0, np.int32(3), np.float32(1), np.int64(-1))
    with pytest.raises(RuntimeError, match="cudaErrorInsufficientDriver"):
        function((1, 2), (128,), good, shared_mem=64, stream=launching._Stream(5))
    with pytest.raises(TypeError, match="Unsupported type"):
        function((1,), (128,), ("text",), shared_mem=0, stream=launching._Stream(5))
    driver = launching.importlib.import_module("cupy_backends.cuda.api.driver")
    assert callable(driver.funcSetAttribute)
    assert driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8
    assert driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT == 9
    assert cupy.cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin == 97
