"""What of the kernel benchmark can be checked without a device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bench.kernels import Workload, decode_workloads, prefill_workloads


def test_workloads_count_what_they_say() -> None:
    work = Workload("two rows", (10, 0), (1, 3), 2)
    assert work.kv_bytes == (11 + 3) * 8 * 128 * 2 * 2
    assert work.flops == 2 * 2 * 8 * 2 * 128 * (11 + 1 + 2 + 3)
    for work in decode_workloads():
        megabytes = int(work.name.split()[1])
        assert abs(work.kv_bytes / (megabytes << 20) - 1) < 0.05, work.name
        assert set(work.new) == {1}
    assert all(work.group == 4 for work in prefill_workloads())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is here")
def test_one_line_without_a_device() -> None:
    result = subprocess.run([sys.executable, "-m", "bench.kernels"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.strip() == "bench.kernels: no CUDA device"
