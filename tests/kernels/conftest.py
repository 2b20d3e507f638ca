"""Tests that compile are skipped, by name, where NVRTC is not installed; the others run everywhere."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kernels import nvrtc
from tests.kernels.backends import use_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    compiled = [item for item in items if item.get_closest_marker("nvrtc")]
    if not compiled:
        return
    try:
        nvrtc.version()
    except nvrtc.NvrtcUnavailable as error:
        for item in compiled:
            item.add_marker(pytest.mark.skip(reason=str(error)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", choices=("ptx", "gpu"), default="ptx", help="where the kernel tests run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nvrtc: compiles kernels")
    wanted = config.getoption("--kernels", "ptx") == "gpu"
    if wanted and not torch.cuda.is_available():
        raise pytest.UsageError("--kernels gpu: no CUDA device")
    use_device(wanted)
