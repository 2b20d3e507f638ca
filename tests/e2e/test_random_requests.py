"""Random requests, valid and not, cancelled at random: the campaign of bench/random_requests.py, in short and long."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.random_requests import run
from tests.e2e.harness import Cluster
from tests.e2e.verify import settled


def test_some_random_requests(shared: Cluster) -> None:
    args = argparse.Namespace(
        requests=200, seconds=100.0, seed=11, concurrency=8, pause_every=200, growth=256.0, executor="first"
    )
    record = asyncio.run(run(args, shared, settled))
    assert record["faults"] == []
    assert record["requests"] == 200
    assert {"OK", "INVALID_ARGUMENT", "CANCELLED"} <= set(record["ends"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_random_requests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.random_requests", "--requests", "10000", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads((tmp_path / "r.json").read_text())
    assert sum(record["ends"].values()) == record["requests"] == 10_000
