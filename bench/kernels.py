"""Attention kernels on a GPU, as shares of what the same device reaches in the same run.

usage: python -m bench.kernels [--seconds 0.3] [--json FILE]

Decode is measured in bytes of KV read, beside the faster of a read stream and a device-to-device copy (its bytes read
and written); prefill in multiply-adds, beside a bf16 matrix product. Both stand beside torch's
scaled_dot_product_attention and compiled FlexAttention over as many keys and values, contiguous (they do not page).
Times are medians of CUDA events, launch included; the L2 cache is flushed before each decode. Without a GPU it ends
with one line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from executor_svc.backends.cuda.ops import BLOCKS_PER_MULTIPROCESSOR
from executor_svc.kernels.attention import AttentionShape, DevicePlan, PagedAttention
from executor_svc.kernels.launch import CupyLauncher
from executor_svc.kernels.plan import plan_attention

BLOCK_SIZE, HEAD_DIM, KV_HEADS = 16, 128, 8
COPY_BYTES = 1 << 30
FLUSH_BYTES = 256 << 20  # beyond any L2


@dataclass(frozen=True, slots=True)
class Workload:
    """``past`` tokens cached and ``new`` ones to run, of each row; ``group`` query heads a KV head."""

    name: str
    past: tuple[int, ...]
    new: tuple[int, ...]
    group: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that have to be read once, in bf16."""
        return 4 * KV_HEADS * HEAD_DIM * sum(p + n for p, n in zip(self.past, self.new, strict=True))

    @property
    def flops(self) -> int:
        """Of both products, a multiply-add counted as two, over the visible positions only."""
        pairs = sum(n * p + n * (n + 1) // 2 for p, n in zip(self.past, self.new, strict=True))
        return 4 * KV_HEADS * self.group * HEAD_DIM * pairs


def decode_workloads() -> Iterator[Workload]:
    """64 MB, 512 MB and 2 GB of KV, in batches of 1 to 256, groups 1 to 8, and skewed lengths."""
    per_token = 4 * KV_HEADS * HEAD_DIM
    for megabytes in (64, 512, 2048):
        tokens = (megabytes << 20) // per_token
        for batch in (1, 8, 32, 256):
            for group in (1, 4, 8):
                past = (tokens // batch - 1,) * batch
                yield Workload(f"decode {megabytes} MB, batch {batch}, group {group}", past, (1,) * batch, group)
        lengths = np.random.default_rng(0).pareto(1.2, 64) + 0.02
        skewed = tuple(int(n) for n in np.maximum(lengths / lengths.sum() * tokens, 1))
        yield Workload(f"decode {megabytes} MB, batch 64, skewed, group 4", skewed, (1,) * 64, 4)


def prefill_workloads() -> Iterator[Workload]:
    for past, new, batch in ((0, 1024, 8), (0, 4096, 4), (0, 16384, 1), (8192, 2048, 4)):
        yield Workload(f"prefill {batch} x {new} after {past}", (past,) * batch, (new,) * batch, 4)


class PagedCase:
    """A workload's tensors on the device, and its launches."""

    def __init__(self, launcher: CupyLauncher, work: Workload) -> None:
        rows = len(work.past)
        past, new = np.array(work.past, np.int32), np.array(work.new, np.int32)
        blocks = -(-(past + new) // BLOCK_SIZE)
        order = np.random.default_rng(1).permutation(int(blocks.sum())).astype(np.int32)
        tables = np.full((rows, int(blocks.max())), -1, np.int32)
        at = np.concatenate([[0], np.cumsum(blocks)])
        for row in range(rows):
            tables[row, : blocks[row]] = order[at[row] : at[row + 1]]
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        q_heads = KV_HEADS * work.group
        self._shape = AttentionShape(torch.bfloat16, q_heads, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HEAD_DIM**-0.5)
        plan = plan_attention(
            starts, new, past, group=work.group, kv_heads=KV_HEADS, window=0, tile_rows=self._shape.tile_rows,
            target_blocks=BLOCKS_PER_MULTIPROCESSOR * launcher.num_multiprocessors,
        )  # fmt: skip
        self._items = DevicePlan(*(torch.from_numpy(part).cuda() for part in (plan.decode, plan.prefill, plan.merges)))
        size = (len(order), KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self._keys, self._values = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in "kv")
        self._tables = torch.from_numpy(tables).cuda()
        self._q = torch.randn(int(starts[-1]), q_heads * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self._out = torch.empty_like(self._q)
        slots = max(plan.num_slots, 1) * KV_HEADS * 16
        self._workspace = (torch.empty(slots * HEAD_DIM, device="cuda"), torch.empty(slots, device="cuda"))
        self._attention = PagedAttention(launcher, self._shape)

    def run(self) -> None:
        self._attention(self._out, self._q, self._keys, self._values, self._tables, self._items, self._workspace)


def contiguous_attention(work: Workload) -> Callable[[], Any] | None:
    """torch's attention over rows of one length; None for skewed workloads and chunks, which it cannot batch."""
    if len(set(work.past)) > 1 or (work.new[0] > 1 and work.past[0] > 0):
        return None
    batch, length = len(work.past), work.past[0] + work.new[0]
    q = torch.randn(batch, KV_HEADS * work.group, work.new[0], HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(batch, KV_HEADS, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    causal = work.new[0] > 1
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def flex_attention(work: Workload) -> Callable[[], Any] | None:
    """torch's FlexAttention, compiled, over rows of one length; None for skewed workloads."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if len(set(work.past)) > 1:
        return None
    batch, past, new = len(work.past), work.past[0], work.new[0]
    q = torch.randn(batch, KV_HEADS * work.group, new, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(batch, KV_HEADS, past + new, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv")

    def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
        return query + past >= key

    mask = None
    if new > 1:
        mask = create_block_mask(visible, None, None, new, past + new, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def median_seconds(run: Callable[[], Any], seconds: float, flush: torch.Tensor | None = None) -> float:
    """Median time of one call on the device, over about ``seconds``; at least five calls, after three to warm up."""
    times: list[float] = []
    for index in range(100_000):
        if flush is not None:
            flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(start.elapsed_time(end) / 1e3)
        if len(times) >= 5 and sum(times) >= seconds:
            break
    return statistics.median(times)


def copy_rate(seconds: float) -> float:
    """Bytes a second, read and written, of a copy on the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source), seconds)


def read_rate(seconds: float) -> float:
    """Bytes a second of a sum over memory, which reads and writes nothing."""
    source = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    return COPY_BYTES / median_seconds(source.sum, seconds)


def product_rate(seconds: float) -> float:
    """Operations a second of a bf16 matrix product, a multiply-add counted as two."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / median_seconds(lambda: left @ right, seconds)


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    microseconds: float
    rate: float  # GB/s or TFLOP/s
    share: float  # of the stream or the matrix product
    torch_microseconds: float | None
    flex_microseconds: float | None


def _measure(launcher: CupyLauncher, work: Workload, seconds: float, peak: float, flush: torch.Tensor | None) -> Result:
    """``peak`` in bytes/s (with ``flush``: decode) or multiply-adds times two a second."""
    case = PagedCase(launcher, work)
    ours = median_seconds(case.run, seconds, flush)
    del case
    theirs = [_other(make, work, seconds, flush) for make in (contiguous_attention, flex_attention)]
    rate = (work.kv_bytes if flush is not None else work.flops) / ours
    return Result(work.name, ours * 1e6, rate / (1e9 if flush is not None else 1e12), rate / peak, *theirs)


def _other(
    make: Callable[[Workload], Callable[[], Any] | None], work: Workload, seconds: float, flush: torch.Tensor | None
) -> float | None:
    """Microseconds; None where it cannot run the workload, with one line if that was not known before."""
    try:
        run = make(work)
        return None if run is None else median_seconds(run, seconds, flush) * 1e6
    except Exception as error:  # another library's failure is no reason to lose our own figures
        print(f"{work.name}: {make.__name__}: {type(error).__name__}: {str(error).splitlines()[:1]}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="device time of each measurement")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.kernels: no CUDA device")
    torch.cuda.set_stream(torch.cuda.Stream())
    launcher = CupyLauncher()
    copy, read, product = copy_rate(options.seconds), read_rate(options.seconds), product_rate(options.seconds)
    stream = max(copy, read)
    print(
        f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s, read {read / 1e9:.0f} GB/s, "
        f"bf16 product {product / 1e12:.0f} TFLOP/s"
    )
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    results = [_measure(launcher, work, options.seconds, stream, flush) for work in decode_workloads()]
    results += [_measure(launcher, work, options.seconds, product, None) for work in prefill_workloads()]
    for result in results:
        others = (("sdpa", result.torch_microseconds), ("flex", result.flex_microseconds))
        beside = "".join(f"  {name} {value:9.1f} us" for name, value in others if value is not None)
        unit = "GB/s" if result.name.startswith("decode") else "TFLOP/s"
        print(f"{result.name:44} {result.microseconds:9.1f} us {result.rate:7.0f} {unit} {result.share:6.1%}{beside}")
    if options.json:
        figures = {
            "copy_bytes_per_s": copy,
            "read_bytes_per_s": read,
            "product_flops": product,
            "results": [asdict(r) for r in results],
        }
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
