"""Every number that shapes the core's behaviour, in one place. All times are seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class CoreConfig:
    depth: int = 2  # plans unanswered per executor
    prefix_cache: bool = True
    max_prefill_chunk: int = 0  # tokens a prefill row; 0: what the step's budget allows
    max_batch_tokens: int = 0  # new tokens a step; 0: the executor's own limit
    kv_blocks_limit: int = 0  # caps every executor's pool; 0: what the executor has

    max_waiting: int = 4096  # waiting sequences per model; beyond: RESOURCE_EXHAUSTED
    queue_retry_after: float = 1.0  # told to a client that found the queue full
    ageing: float = 10.0  # waiting this long is worth one priority class
    prefix_wait: float = 1.0  # at most this long for a prefix that another sequence is computing
    placement_wait: float = 1.0  # at most this long for its turn on a better placed executor
    fair_window: float = 120.0  # a tenant ahead of others in service stands back by up to this (0: no fair shares) ...
    fair_tokens: int = 16384  # ... which it reaches when it is this many tokens ahead
    kv_overcommit: float = 4.0  # admit while the peak of KV that may be needed is within this many pools (0: no look)
    itl_target: float = 0.5  # between two tokens of a stream while prompts are computed (0: none)
    text_run_ahead: int = 32  # tokens past the worker's acknowledgement, for streams that stop on text

    wait_for_executor: float = 30.0  # then UNAVAILABLE
    startup_grace: float = 10.0  # after a start, an unknown model may still come
    forget_model_after: float = 600.0  # a model without executors and requests
    expect_executor_for: float = 600.0  # an executor that vanished without a Goodbye counts as expected back
    max_executors: int = 256
    max_models: int = 64
    max_workers: int = 64

    # Age at which the oldest unanswered step means a hung executor (step_age.py): where steps were measured ...
    step_timeout: float = 3.5
    step_slack: float = 4.0  # ... plus so many times what one of its size took at worst
    cold_step_timeout: float = 30.0  # where they were not yet ...
    step_timeout_per_token: float = 0.05  # ... plus this for each of its tokens
    good_steps: int = 32  # two epochs lost with fewer answered steps between quarantine the executor
    quarantine: float = 30.0
    suspicion_clears: int = 8  # outputs after a death that clear a suspect
    isolate_after: int = 2  # deaths at which a suspect runs alone
    fail_after_alone: int = 2  # deaths while alone that end a request

    ping_interval: float = 0.25
    asset_chunk: int = 256 * 1024
    asset_cache: int = 512 * 1024 * 1024  # bytes over all models
    max_asset_waiters: int = 1024

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 8:
            raise ValueError(f"depth {self.depth}: 1 to 8")
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} {getattr(self, field.name)}: must not be negative")
        if 0.0 < self.kv_overcommit < 1.0:
            raise ValueError(f"kv_overcommit {self.kv_overcommit:g}: 0, or at least 1")
        if self.text_run_ahead < 1:
            raise ValueError("text_run_ahead must be at least 1")
