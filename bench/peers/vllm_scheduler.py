"""vLLM's V1 scheduler alone, stepped on command. Runs in an interpreter that has vLLM, and imports nothing of ours.

Reads JSON lines from stdin and answers each with one on stdout::

    {"running": 256, "churn": true, "steps": 50}  ->  {"us": [...], "rows": 256, "version": "..."}

``us`` is the processor time of each step in microseconds: ``schedule()`` and ``update_from_output()``, and with churn
``add_request()`` for the arrivals. Making the request objects, hashing their prompts and inventing the answers is not
counted. A scheduler is kept between commands with the same numbers, so that steps can be measured in slices.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, CONTEXT, VOCAB, PROMPT = 16, 2048, 49000, 128
BUDGET = 16384  # new tokens a step
LIFE = 100  # outputs of a request under churn: 1 % end at each step
STEADY_LIFE = 1900

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip


def make_scheduler(folder: str, running: int) -> Scheduler:
    blocks = (running + running // 50 + 2) * (CONTEXT // BLOCK)
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=CONTEXT),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=BUDGET,
            max_num_seqs=running + running // 50 + 2,
            max_model_len=CONTEXT,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


class Bench:
    def __init__(self, folder: str, running: int, churn: bool) -> None:
        self.scheduler = make_scheduler(folder, running)
        self.random = random.Random(0)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.number = 0
        self.arrivals = max(1, running // 100) if churn else 0
        every = running // self.arrivals if churn else 1
        for i in range(running):
            # Under churn the first ends are spread as evenly as later ones.
            self.scheduler.add_request(self.request(1 + i // self.arrivals % every if churn else STEADY_LIFE))
        while self.scheduler.waiting or any(
            r.num_computed_tokens < r.num_prompt_tokens for r in self.scheduler.running
        ):
            self.step([])

    def request(self, outputs: int) -> Request:
        self.number += 1
        return Request(
            request_id=str(self.number),
            # Lengths that differ, so that sequences need their next blocks at different steps.
            prompt_token_ids=[self.random.randrange(3, VOCAB) for _ in range(PROMPT - self.number % BLOCK)],
            sampling_params=SamplingParams(max_tokens=outputs, temperature=0.0),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def answer(self, plan: Any) -> ModelRunnerOutput:
        ids = list(plan.num_scheduled_tokens)
        requests = self.scheduler.requests
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[
                [self.random.randrange(3, VOCAB)] if requests[r].num_computed_tokens >= requests[r].num_tokens else []
                for r in ids
            ],
        )

    def step(self, arrivals: list[Request]) -> tuple[float, int]:
        """(seconds of processor time, rows)."""
        began = time.thread_time()
        for request in arrivals:
            self.scheduler.add_request(request)
        plan = self.scheduler.schedule()
        planned = time.thread_time()
        answer = self.answer(plan)
        resumed = time.thread_time()
        self.scheduler.update_from_output(plan, answer)
        return planned - began + time.thread_time() - resumed, len(answer.req_ids)

    def steps(self, count: int) -> dict[str, Any]:
        us, rows = [], 0
        for _ in range(count):
            seconds, rows = self.step([self.request(LIFE) for _ in range(self.arrivals)])
            us.append(seconds * 1e6)
        return {"us": us, "rows": rows, "version": vllm.__version__}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    init_none_hash(sha256)
    current: tuple[tuple[int, bool], Bench] | None = None
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(MODEL, file)
        for line in sys.stdin:
            order = json.loads(line)
            key = (order["running"], order["churn"])
            if current is None or current[0] != key:
                current = None  # the old one's memory first
                current = key, Bench(folder, *key)
            print(json.dumps(current[1].steps(order["steps"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
