"""The worker's round with a model that costs nothing: what a step costs outside forward and sampling.

    python -m bench.round [--rows 1,32,256] [--steps 300] [--json FILE]

For each number of rows in steady decode, the median over steps of: decoding the plan's bytes, applying it to the mirror
(digest included), preparing the inputs, and post-processing with the result encoded. Budget: 300 us + 3 us a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from executor_svc.inputs import prepare_inputs
from executor_svc.malloc import keep_freed_memory
from executor_svc.model_runner import ModelRunner
from executor_svc.models.null import NullModel
from executor_svc.slots import SlotLimits, Slots
from executor_svc.worker import StepState, Worker
from protos.digest import epoch_digest, plan_digest
from protos.step import Admission, EpochLost, SamplingParams, StepPlan, StepResult, ToExecutor
from protos.wire import Epoch, pack_int32

BUDGET_US, BUDGET_ROW_US = 300.0, 3.0
PARTS = ("decode", "apply", "prepare_inputs", "forward", "sample", "post_process")
COUNTED = ("decode", "apply", "prepare_inputs", "post_process")

BLOCK_SIZE = 16
PROMPT = 128  # tokens
FIRST_BLOCKS = PROMPT // BLOCK_SIZE + 1
EPOCH = Epoch(1, 1)


def steady_plans(rows: int, steps: int) -> list[bytes]:
    """One plan that admits every row, then ``steps`` decode plans, each appending the blocks that rows then need."""
    generation = np.ones(rows, dtype=np.int32)
    num_blocks = np.full(rows, FIRST_BLOCKS, dtype=np.int32)
    slots = np.arange(rows, dtype=np.int32)
    last_block = (slots + 1) * FIRST_BLOCKS - 1
    free = rows * FIRST_BLOCKS
    encoder = msgspec.msgpack.Encoder()
    digest = epoch_digest(EPOCH)
    none = np.zeros(0, dtype=np.int32)
    prompt = pack_int32(np.arange(PROMPT) % 97)
    admitted = tuple(
        Admission(
            slot=slot,
            generation=1,
            request_id=f"r{slot}",
            choice=0,
            prompt=prompt,
            outputs=b"",
            computed=0,
            blocks=pack_int32(range(slot * FIRST_BLOCKS, (slot + 1) * FIRST_BLOCKS)),
            sampling=SamplingParams(temperature=0.0),
        )
        for slot in range(rows)
    )
    digest = plan_digest(digest, 1, none, np.concatenate((slots, slots)), generation, num_blocks, last_block)
    prefill = pack_int32(np.stack((slots, np.full(rows, PROMPT)), axis=1).ravel())
    frames = [encoder.encode(StepPlan(epoch=EPOCH, seq=1, digest=digest, admitted=admitted, prefill=prefill))]
    for step in range(steps):
        # Rows need a block every BLOCK_SIZE steps; spread over the steps as real sequences are.
        due = slots[slots % BLOCK_SIZE == step % BLOCK_SIZE]
        blocks = np.arange(free, free + len(due), dtype=np.int32)
        free += len(due)
        num_blocks[due] += 1
        last_block[due] = blocks
        touched = np.concatenate((due, slots))
        digest = plan_digest(digest, step + 2, none, touched, generation, num_blocks, last_block)
        appended = pack_int32(np.stack((due, blocks), axis=1).ravel())
        frames.append(
            encoder.encode(
                StepPlan(epoch=EPOCH, seq=step + 2, digest=digest, decode=slots.tobytes(), appended=appended)
            )
        )
    return frames


def measure(rows: int, steps: int) -> dict[str, float]:
    """Median microseconds of each part of a decode step."""
    model = NullModel(97, context_length=PROMPT + steps + 3 * BLOCK_SIZE)
    limits = SlotLimits(
        num_blocks=rows * (PROMPT + steps + 3 * BLOCK_SIZE) // BLOCK_SIZE + rows,
        block_size=BLOCK_SIZE,
        max_slots=rows,
        max_batch_tokens=rows * PROMPT,
        vocab_size=97,
        context_length=model.facts.context_length,
    )
    encoder = msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(ToExecutor)  # the whole union, as the link decodes
    sent: list[bytes] = []

    def send(message: StepResult | EpochLost) -> None:
        if isinstance(message, EpochLost):
            raise RuntimeError(message.detail)
        sent.append(encoder.encode(message))

    worker = Worker(Slots(limits), ModelRunner(model, rows), send)
    worker.begin_epoch(EPOCH)
    first, *frames = steady_plans(rows, steps)
    admission = decoder.decode(first)
    assert isinstance(admission, StepPlan)
    worker.execute_plan(admission)
    times: dict[str, list[float]] = {part: [] for part in PARTS}

    def timed(part: str, function: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter_ns()
        result = function(*args)
        times[part].append((time.perf_counter_ns() - started) / 1e3)
        return result

    for frame in frames:  # the same calls, in the same order, as Worker.execute_model_step
        sent.clear()
        message = timed("decode", decoder.decode, frame)
        plan = timed("apply", worker.slots.apply, message)
        metadata = timed("prepare_inputs", prepare_inputs, plan, worker.slots)
        main_output = timed("forward", worker.model_runner.execute_main_model, metadata)
        sampled = timed("sample", worker.model_runner.execute_sample, main_output, metadata)
        timed("post_process", worker.post_process, StepState(metadata, sampled, time.perf_counter()))
    return {part: statistics.median(values) for part, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,256", help="numbers of rows, comma-separated")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)  # the null model has nothing to share out
    results = []
    print("rows  " + "".join(f"{part:>15}" for part in PARTS) + f"{'round':>10}{'budget':>10}   us, median of a step")
    for rows in (int(text) for text in args.rows.split(",")):
        parts = measure(rows, args.steps)
        total = sum(parts[part] for part in COUNTED)
        budget = BUDGET_US + BUDGET_ROW_US * rows
        results.append({"rows": rows, "round_us": total, "budget_us": budget, "within": total <= budget, **parts})
        print(f"{rows:<6}" + "".join(f"{parts[p]:>15.1f}" for p in PARTS) + f"{total:>10.1f}{budget:>10.0f}")
    if args.json:
        args.json.write_text(json.dumps({"steps": args.steps, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
