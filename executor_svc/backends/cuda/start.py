"""From a loaded model to a runner that is ready to serve: buffers, a measured step, the cache, graphs, in turn."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from executor_svc.backends.cuda.decoder import CudaDecoder
from executor_svc.backends.cuda.graphs import MAX_GRAPH_ROWS
from executor_svc.backends.cuda.memory import DEFAULT_FRACTION, Measured, kv_blocks, room_for
from executor_svc.backends.cuda.runner import CudaRunner
from executor_svc.errors import PlanError
from executor_svc.kv_memory import KvMemoryError
from executor_svc.metadata import StepMetadata
from executor_svc.pieces import MAX_SCORED
from executor_svc.sampling.rows import SampleRows
from protos.step import OUT_OF_MEMORY

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartSettings:
    block_size: int  # tokens
    max_slots: int
    max_batch_tokens: int
    kv_memory: int | None = None  # bytes
    kv_blocks: int | None = None
    fraction: float = DEFAULT_FRACTION  # of the device's memory
    graphs: bool = True


def start(model: CudaDecoder, settings: StartSettings) -> tuple[CudaRunner, int]:
    """-> the runner and the number of KV blocks. Raises KvMemoryError, MemoryError where the device is full."""
    with room_for("the buffers of a step, the KV cache and the graphs"):
        return _start(model, settings)


def _start(model: CudaDecoder, settings: StartSettings) -> tuple[CudaRunner, int]:
    max_rows = min(settings.max_slots, settings.max_batch_tokens)
    runner = CudaRunner(model, settings.max_slots)
    model.reserve(max_rows, settings.max_batch_tokens, settings.block_size)
    measured = _measure(runner, settings, max_rows)
    blocks = kv_blocks(
        model.facts,
        settings.block_size,
        settings.max_slots,
        measured,
        settings.fraction,
        settings.kv_memory,
        settings.kv_blocks,
    )
    model.allocate_kv_cache(blocks, settings.block_size)
    graphs = runner.capture_graphs(max_rows) if settings.graphs else 0
    log.info(
        "device ready",
        extra={
            "device": model.device.description(),
            "used_bytes": measured.used,
            "step_bytes": measured.step,
            "graph_bytes": measured.graphs,
            "kv_blocks": blocks,
            "graphs": graphs,
        },
    )
    return runner, blocks


def _measure(runner: CudaRunner, settings: StartSettings, max_rows: int) -> Measured:
    """Run the largest step, over a cache of one block that nothing is written to."""
    model, device = runner.model, runner.model.device
    model.allocate_kv_cache(1, settings.block_size)
    graph_rows = min(max_rows, MAX_GRAPH_ROWS)
    tokens = min(settings.max_batch_tokens, max_rows * model.facts.context_length)
    largest = _profile_step(tokens, max_rows, settings.block_size)
    decode = _profile_step(graph_rows, graph_rows, settings.block_size)

    def run(metadata: StepMetadata) -> None:
        try:
            runner.execute_sample(runner.execute_main_model(metadata), metadata).output()
        except PlanError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise KvMemoryError(
                f"a step of {metadata.num_tokens} tokens over {metadata.num_rows} rows does not fit the GPU beside the "
                f"weights: lower --max-batch-tokens or --max-slots ({error.detail.splitlines()[0]})"
            ) from error

    run(largest)  # libraries take their workspaces at the first call; these stay
    step = device.measure(lambda: run(largest))
    graphs = device.measure(lambda: run(decode)) if settings.graphs else 0
    runner.clear()
    row = 4 * model.facts.vocab_size  # bytes of one row's logits
    # Not in that step: the copy of rows that want logprobs, and rows of prompt positions. Graphs keep their logits.
    step += row * (max_rows + 3 * MAX_SCORED)
    graphs += row * graph_rows if settings.graphs else 0
    return Measured(device.memory(), step, graphs)


def _profile_step(tokens: int, rows: int, block_size: int) -> StepMetadata:
    """``tokens`` new tokens over ``rows`` rows, all of which sample; their keys and values are written nowhere."""
    lens = np.full(rows, tokens // rows, np.int32)
    lens[: tokens % rows] += 1
    starts = np.zeros(rows + 1, np.int32)
    np.cumsum(lens, out=starts[1:])
    slots, zeros = np.arange(rows, dtype=np.int32), np.zeros(rows, np.int64)
    return StepMetadata(
        input_ids=np.zeros(tokens, np.int64),
        positions=np.arange(tokens) - np.repeat(starts[:-1], lens),
        slots=slots,
        seq_lens=np.zeros(rows, np.int32),
        query_lens=lens,
        query_starts=starts,
        block_tables=np.zeros((rows, -(-int(lens.max()) // block_size)), np.int32),
        kv_slots=np.full(tokens, -1, np.int64),
        logit_indices=starts[1:].astype(np.int64) - 1,
        logit_rows=slots,
        num_decode_rows=0,
        sample_rows=SampleRows(slots, np.zeros(rows, np.int32), zeros, zeros, None, ()),
    )
