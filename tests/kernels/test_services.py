"""Both services end to end with ``--device cuda``: the tokens that clients get are the CPU backend's, in float32.

Without a GPU the executor's device is a stand-in whose kernels run in the interpreter: all else is as it will be.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Cluster
from tests.e2e.streams import GREEDY, SEEDED, generate, ids, request
from tests.executor.model.tiny import make_tiny_llama
from tests.kernels import backends

SMALL = ["--max-batch-tokens", "24", "--max-slots", "2", "--kv-blocks", "12", "--weights", "float32"]


@pytest.mark.nvrtc
@pytest.mark.slow  # in the interpreter
@pytest.mark.timeout(400)
def test_tokens_equal_the_cpus(tmp_path: Path) -> None:
    model = make_tiny_llama(
        tmp_path / "tiny", head_dim=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64,
    )  # fmt: skip
    module = "executor_svc" if backends.on_device() else "tests.kernels.stand_in_executor"
    with Cluster(tmp_path / "run") as cluster:
        cluster.start_executor("cpu", model, "--name", "cpu", "--kv-blocks", "12", "--weights", "float32")
        cluster.start_executor("gpu", model, "--name", "gpu", "--device", "cuda", *SMALL, module=module)
        cluster.start_scheduler()
        cluster.wait_ready(model="cpu")
        cluster.wait_ready(model="gpu")
        prompts = ([5, 6, 7, 8, 9], list(range(40, 70)))  # the longer one in two chunks
        answers = {
            name: generate(
                cluster.address,
                [request(prompts[0], 7, name, **GREEDY), request(prompts[1], 5, name, seed=3, **SEEDED)],
            )
            for name in ("cpu", "gpu")
        }
    assert ids(answers["gpu"]) == ids(answers["cpu"])
    assert [len(answer.ids) for answer in answers["gpu"]] == [7, 5]
