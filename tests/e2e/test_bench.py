"""The load generator against real services."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import serve
from tests.e2e.harness import Cluster
from tests.e2e.verify import settled

OUTPUT = 48  # tokens: more than one message, and so times between them, even where a writer is late
LOADS = {  # different seeds: the prompts of one load must not be in the prefix cache from another
    "concurrency": ["--concurrency", "4", "--num-requests", "8", "--seed", "1"],
    "rate": ["--request-rate", "50", "--num-requests", "6", "--temperature", "0.8", "--seed", "2"],
    "shared-prefix": ["--prompt", "shared-prefix", "--num-requests", "4", "--prefix-tokens", "32", "--seed", "3"],
    "two processes": ["--concurrency", "4", "--num-requests", "4", "--processes", "2", "--seed", "4"],
}


@pytest.mark.parametrize("name", LOADS)
def test_figures(shared: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    out = tmp_path / "out.json"
    args = ["--address", shared.address, "--input-tokens", "40", "--output-tokens", str(OUTPUT), "--ignore-eos"]
    assert serve.main([*args, *LOADS[name], "--warmup", "2", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    figures = result["figures"]
    assert figures["completed"] == figures["requests"] == len(result["requests"])
    assert figures["output_tokens"] == OUTPUT * figures["completed"]
    assert figures["input_tokens"] == 40 * figures["completed"]
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert 0 < figures[key]["median"] <= figures[key]["p99"]
    assert figures["e2el_ms"]["mean"] > figures["ttft_ms"]["mean"]
    assert 0 < figures["generator"]["cpu_share"] < 2
    assert (figures["cached_tokens"] > 0) == (name == "shared-prefix")
    table = capsys.readouterr().out
    assert "TTFT" in table
    assert "output tokens/s" in table
    settled(shared)


def test_failures_are_counted(shared: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ["--address", shared.address, "--input-tokens", "5000", "--output-tokens", "4", "--num-requests", "3"]
    assert serve.main([*args, "--warmup", "0", "--json", str(out)]) == 1
    figures = json.loads(out.read_text())["figures"]
    assert figures["failures"] == {"INVALID_ARGUMENT": 3}
    assert figures["completed"] == 0
    settled(shared)
