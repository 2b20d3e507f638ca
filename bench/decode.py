"""Whole decode steps on a GPU: how near to the memory's speed, and how long the device idles between them.

usage: python -m bench.decode [--steps 200] [--json FILE]

A model of Llama-8B shapes with random bfloat16 weights runs rounds as the worker does under overlap: inputs, forward,
the results of the step before, sampling. The roofline of a step is what it has to read, weights and KV cache, at the
speed of the faster of a measured read stream and a copy on the device. The idle gap is measured on the device, from the
end of one step's last kernel to the arrival of the next one's inputs: the results' copy to the host lies in it. With
captured graphs, and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from bench.kernels import copy_rate, read_rate
from executor_svc.backends.cuda.build import WEIGHTS, CudaBuilder
from executor_svc.backends.cuda.decoder import CudaDecoder
from executor_svc.backends.cuda.device import Device, open_device
from executor_svc.backends.cuda.runner import CudaRunner
from executor_svc.backends.cuda.staging import Landing
from executor_svc.errors import DeviceUnavailable
from executor_svc.metadata import StepMetadata
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig
from executor_svc.models.parameters import layer_shapes
from executor_svc.models.rope import rope_table
from executor_svc.sampling.rows import SampleRows
from executor_svc.sampling.sampler import Sampled

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, context_length=8192, rms_norm_eps=1e-5, tie_embeddings=False,
)  # fmt: skip
BLOCK_SIZE = 16
BATCHES = (1, 32, 256)
PAST = 1024  # tokens cached of each row at first
WARM_UP = 10  # steps


class Timer(Protocol):
    def mark(self) -> Any:
        """A point in the device's order of work."""
        ...

    def microseconds(self, first: Any, second: Any) -> float: ...


class EventTimer:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        second.synchronize()
        return first.elapsed_time(second) * 1e3


@dataclass(frozen=True, slots=True)
class Result:
    batch: int
    graphs: bool
    step_us: float  # from one step's start to the next one's, mean
    roofline_us: float
    share: float  # of the roofline
    gap_us_p50: float
    gap_us_p99: float
    copy_us_p50: float  # of the gap: the results' copy
    host_us: float  # a round on the host without its wait for results, median


def random_model(config: ModelConfig, device: Device, weights: str = "bfloat16") -> CudaDecoder:
    """Weights are made on the device, layer by layer."""
    dtype, where = WEIGHTS[weights], device.launcher.device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=where).mul_(shape[-1] ** -0.5)

    rope = rope_table(config.rope, config.head_dim, config.context_length)
    builder = CudaBuilder(config, rope, weights, device)
    builder.set_embedding(random(config.vocab_size, config.hidden_size))
    builder.set_head(random(config.vocab_size, config.hidden_size))
    builder.set_final_norm(torch.ones(config.hidden_size))
    for layer in range(config.num_layers):
        shapes = layer_shapes(config, layer)
        parts = {name: random(*shape) if len(shape) > 1 else torch.ones(shape) for name, shape in shapes.items()}
        builder.set_layer(layer, parts)
    kv = 2 * config.num_layers * config.kv_size * dtype.itemsize
    return builder.build(
        ModelFacts("random", "llama", config.vocab_size, config.context_length, config.num_layers, kv, (), "", "")
    )


def step_bytes(config: ModelConfig, facts: ModelFacts, batch: int, length: int, element: int = 2) -> int:
    """What a decode step has to read: every matrix but the embedding once, and the KV of ``length`` tokens a row."""
    layer = sum(int(np.prod(shape)) for shape in layer_shapes(config, 0).values())
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    return element * weights + batch * length * facts.kv_bytes_per_token


def decode_metadata(batch: int, past: int, tables: np.ndarray) -> StepMetadata:
    rows = np.arange(batch, dtype=np.int32)
    position = np.full(batch, past, np.int64)
    counts = np.zeros(batch, np.int64)
    return StepMetadata(
        input_ids=np.full(batch, -1, np.int64),
        positions=position,
        slots=rows,
        seq_lens=np.full(batch, past, np.int32),
        query_lens=np.ones(batch, np.int32),
        query_starts=np.arange(batch + 1, dtype=np.int32),
        block_tables=tables[:, : past // BLOCK_SIZE + 1],
        kv_slots=tables[:, past // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + past % BLOCK_SIZE,
        logit_indices=np.arange(batch),
        logit_rows=rows,
        num_decode_rows=batch,
        sample_rows=SampleRows(rows, np.zeros(batch, np.int32), position, counts, None, ()),
    )


def measure(
    model: CudaDecoder, batch: int, past: int, steps: int, graphs: bool, read_bytes_per_s: float, timer: Timer
) -> Result:
    config = model.config
    width = (past + steps + WARM_UP) // BLOCK_SIZE + 1
    model.allocate_kv_cache(batch * width, BLOCK_SIZE)
    for tensor in model.kv_tensors():
        tensor.zero_()
    order = np.random.default_rng(0).permutation(batch * width).astype(np.int32)
    tables = order.reshape(batch, width)
    runner = CudaRunner(model, batch)
    model.reserve(batch, batch, BLOCK_SIZE)
    if graphs:
        runner.capture_graphs(batch)
    starts: list[Any] = []  # inputs are there
    ends: list[Any] = []  # the last kernel ended
    copied: list[Any] = []
    host: list[float] = []
    restore = _mark_arrivals(model, lambda: starts.append(timer.mark()))
    _mark_ends(runner, lambda: ends.append(timer.mark()))
    previous: Sampled | None = None
    for step in range(WARM_UP + steps):
        begun = time.perf_counter()
        metadata = decode_metadata(batch, past + step, tables)
        output = runner.execute_main_model(metadata)
        waiting = time.perf_counter()
        if previous is not None:
            previous.output()
        resumed = time.perf_counter()
        previous = runner.execute_sample(output, metadata)
        copied.append(timer.mark())
        host.append(time.perf_counter() - resumed + waiting - begun)
    assert previous is not None
    previous.output()
    restore()
    gaps = [timer.microseconds(end, start) for end, start in zip(ends[WARM_UP:-1], starts[WARM_UP + 1 :], strict=True)]
    copies = [timer.microseconds(end, done) for end, done in zip(ends[WARM_UP:-1], copied[WARM_UP:-1], strict=True)]
    total = timer.microseconds(starts[WARM_UP], copied[-1]) / steps
    needed = step_bytes(config, model.facts, batch, past + WARM_UP + steps // 2, model.dtype.itemsize)
    roofline = needed / read_bytes_per_s * 1e6
    return Result(
        batch, graphs, total, roofline, roofline / total, statistics.median(gaps), float(np.percentile(gaps, 99)),
        statistics.median(copies), statistics.median(host[WARM_UP:]) * 1e6,
    )  # fmt: skip


def _mark_arrivals(model: CudaDecoder, mark: Callable[[], None]) -> Callable[[], None]:
    """Calls ``mark`` when a step's inputs were copied. -> puts it back"""
    begin_step = model.ops.begin_step

    def marked(metadata: StepMetadata, size: int | None = None) -> None:
        begin_step(metadata, size)
        mark()

    model.ops.begin_step = marked  # type: ignore[method-assign]

    def restore() -> None:
        model.ops.begin_step = begin_step  # type: ignore[method-assign]

    return restore


def _mark_ends(runner: CudaRunner, mark: Callable[[], None]) -> None:
    """Calls ``mark`` when a step's last kernel was asked for, before its results are copied."""
    readback = runner._sampler._readback
    copy = readback.copy

    def marked(tensors: Sequence[torch.Tensor]) -> Landing:
        mark()
        return copy(tensors)

    readback.copy = marked  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    options = parser.parse_args()
    try:
        device = open_device()
    except DeviceUnavailable as error:
        print(f"bench.decode: {error}", file=sys.stderr)
        return 2
    copy, read = copy_rate(0.3), read_rate(0.3)
    speed = max(copy, read)
    print(f"{device.description()}: copy {copy / 1e9:.0f} GB/s, read stream {read / 1e9:.0f} GB/s", flush=True)
    model = random_model(LLAMA_8B, device)
    results = []
    for batch in options.batches:
        for graphs in (True, False):
            result = measure(model, batch, PAST, options.steps, graphs, speed, EventTimer())
            results.append(result)
            print(
                f"batch {batch:4} {'graphs' if graphs else 'eager ':6}  {result.step_us:9.1f} us a step, "
                f"{result.share:6.1%} of the roofline; gap p50 {result.gap_us_p50:.1f}, p99 {result.gap_us_p99:.1f} us "
                f"(copy {result.copy_us_p50:.1f}); host {result.host_us:.0f} us",
                flush=True,
            )
            if options.json:  # each at once: a run that is stopped loses none
                figures = {"copy_bytes_per_s": copy, "read_bytes_per_s": read, "stream_bytes_per_s": speed}
                with open(options.json, "w") as file:
                    json.dump(figures | {"results": [asdict(r) for r in results]}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
