"""Tests that compile are skipped, by name, where NVRTC is not installed; the others run everywhere."""

from __future__ import annotations

import pytest

from executor_svc.kernels import nvrtc


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    compiled = [item for item in items if item.get_closest_marker("nvrtc")]
    if not compiled:
        return
    try:
        nvrtc.version()
    except nvrtc.NvrtcUnavailable as error:
        for item in compiled:
            item.add_marker(pytest.mark.skip(reason=str(error)))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nvrtc: compiles kernels")
