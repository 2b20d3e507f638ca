"""``python -m executor_svc``: load a model, size its cache, serve a scheduler."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from executor_svc import logs
from executor_svc.config import ExecutorConfig, parse_args
from executor_svc.errors import DeviceUnavailable
from executor_svc.kv_memory import free_memory, num_blocks
from executor_svc.malloc import keep_freed_memory
from executor_svc.weights.errors import CheckpointError
from executor_svc.weights.hub import HubError, HubModel, fetch

if TYPE_CHECKING:
    from executor_svc.backends.cuda.device import Device
    from executor_svc.model_runner import ModelRunner
    from executor_svc.models.base import Model

log = logging.getLogger("executor_svc")


def main() -> int:
    if any(argument.split("=")[0] == "--simulate" for argument in sys.argv[1:]):
        from executor_svc import simulate

        return simulate.main()  # no model: options of its own
    config = parse_args()
    logs.configure(config.log_format, config.log_level)
    keep_freed_memory()
    try:
        run(config)
    except KeyboardInterrupt:
        return 130
    except DeviceUnavailable as error:
        print(f"executor: --device {config.device}: {error}; use --device cpu", file=sys.stderr)
        return 2  # as for an option that cannot be
    except HubError as error:
        print(f"executor: --model {error}", file=sys.stderr)
        return 2
    except (CheckpointError, ValueError, OSError, MemoryError) as error:
        # Everything that a user can put right: one line, no traceback.
        print(f"executor: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


def run(config: ExecutorConfig) -> None:
    source = located(config)
    from executor_svc.sampling import sampler  # torch and numba: only after the options were checked
    from executor_svc.service import ExecutorService
    from protos.step import Limits

    device = open_device(config)
    started = time.monotonic()
    model, assets = load(config, device, source)
    facts = model.facts
    runner, blocks = prepare(model, config)
    if device is None:
        sampler.warm_up(facts.vocab_size)
    service = ExecutorService(
        model,
        assets,
        Limits(blocks, config.block_size, config.max_slots, config.max_batch_tokens),
        config.scheduler,
        config.executor_name,
        name=config.name,
        runner=runner,
        device_text=f"{device.description() if device else f'cpu {platform.machine()}'}, weights {config.weights}",
        overlap=config.overlap,
        keys=config.keys,
        rehome_after=config.rehome_after,
    )
    service.install_signal_handlers()
    tokens = blocks * config.block_size
    log.info(
        "executor ready",
        extra={
            "model": config.name or facts.name,
            "kv_tokens": tokens,
            "kv_bytes": tokens * facts.kv_bytes_per_token,
            "scheduler": ",".join(config.scheduler),
            "seconds": round(time.monotonic() - started, 1),
        },
    )
    if tokens < facts.context_length:
        log.warning(
            "the KV cache holds less than one full context",
            extra={"kv_tokens": tokens, "context": facts.context_length, "change": "--kv-memory or --kv-blocks"},
        )
    service.run()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it leaves already: a signal that hurries it is no failure
    log.info("executor left", extra={"steps": service.worker.steps})


def open_device(config: ExecutorConfig) -> Device | None:
    """The GPU, or None for the CPU. Raises DeviceUnavailable."""
    if config.device == "cpu":
        return None
    from executor_svc.backends.cuda.device import open_device

    device = open_device()
    if config.null_vocab is not None:
        raise DeviceUnavailable("the null model runs on the CPU only")
    return device


def prepare(model: Model, config: ExecutorConfig) -> tuple[ModelRunner, int]:
    """Give the model its KV cache. -> its runner and the number of blocks"""
    from executor_svc.model_runner import ModelRunner

    if config.device == "cuda":
        from executor_svc.backends.cuda.decoder import CudaDecoder
        from executor_svc.backends.cuda.start import StartSettings, start

        assert isinstance(model, CudaDecoder)
        return start(
            model,
            StartSettings(
                config.block_size,
                config.max_slots,
                config.max_batch_tokens,
                config.kv_memory,
                config.kv_blocks,
                config.gpu_memory_fraction,
                config.cuda_graphs,
            ),
        )
    facts = model.facts
    blocks = num_blocks(facts, config.block_size, config.max_slots, config.kv_memory, config.kv_blocks, free_memory())
    try:
        model.allocate_kv_cache(blocks, config.block_size)
    except (MemoryError, RuntimeError) as error:
        size = blocks * config.block_size * facts.kv_bytes_per_token
        raise MemoryError(f"no memory for a KV cache of {size} bytes: lower --kv-memory or --kv-blocks") from error
    return ModelRunner(model, config.max_slots), blocks


def located(config: ExecutorConfig) -> HubModel | None:
    """The model fetched from the hub where ``--model`` is not a path; before anything heavy is imported."""
    if config.null_vocab is not None or os.path.exists(config.model):
        return None
    return fetch(config.model)


def load(config: ExecutorConfig, device: Device | None, source: HubModel | None) -> tuple[Model, dict[str, bytes]]:
    """The model and the files that the scheduler will ask for; source.json names the commit of a model of the hub."""
    if config.null_vocab is not None:
        import torch

        from executor_svc.models.null import NullModel

        torch.set_num_threads(config.threads or 1)  # nothing to share out: a second thread only waits for the first
        return NullModel(config.null_vocab, name=config.name or "null"), {}
    from executor_svc.models.load import load_model

    loaded = load_model(
        source.path if source else config.model,
        device=device,
        weights=config.weights,
        threads=config.threads,
        attention=config.attention,
        progress=progress_bar() if sys.stderr.isatty() else progress_log(),
        name=config.name or (source.repo if source else None),
        context_length=config.context_length,
        kv_type=config.kv_type,
    )
    if source:
        loaded.assets["source.json"] = json.dumps({"repo": source.repo, "commit": source.commit}).encode()
    return loaded.model, loaded.assets


def progress_bar() -> Callable[[int, int], None]:
    """A callback that draws how many tensors were read."""
    from tqdm import tqdm

    bar = tqdm(desc="weights", unit="tensor", leave=False)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return progress


def progress_log() -> Callable[[int, int], None]:
    """A callback that logs every quarter of the tensors read."""

    def progress(done: int, total: int) -> None:
        if 4 * done // total > 4 * (done - 1) // total:
            log.info("weights", extra={"tensors": done, "of": total})

    return progress


if __name__ == "__main__":
    sys.exit(main())
