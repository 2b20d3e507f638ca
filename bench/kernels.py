"""Attention kernels on a GPU, as shares of what the same device reaches in the same run.

usage: python -m bench.kernels [--seconds 0.3] [--flex-seconds 120] [--json FILE]

Decode is measured in bytes of KV read, beside the faster of a read stream and a device-to-device copy (its bytes read
and written); prefill in multiply-adds, beside a bf16 matrix product. Both stand beside torch's
scaled_dot_product_attention and compiled FlexAttention over the same keys and values, laid out contiguously (they do
not page); the difference of our output from torch's is a figure, too. Times are medians of CUDA events around the
launches, which the device finds in its queue: it is kept busy while the host makes them. The L2 cache is flushed before
each decode. Without a GPU it ends with one line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from executor_svc.backends.cuda.device import open_device
from executor_svc.backends.cuda.ops import BLOCKS_PER_MULTIPROCESSOR
from executor_svc.errors import DeviceUnavailable
from executor_svc.kernels.attention import AttentionShape, DevicePlan, PagedAttention
from executor_svc.kernels.launch import Launcher
from executor_svc.kernels.plan import plan_attention

BLOCK_SIZE, HEAD_DIM, KV_HEADS = 16, 128, 8
COPY_BYTES = 1 << 30
FLUSH_BYTES = 256 << 20  # beyond any L2
BUSY_CYCLES = 1_000_000  # of the device: half a millisecond, longer than the host takes for any of these launches
MOST_CALLS = 200  # of one measurement


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

    def __init__(self, launcher: Launcher, work: Workload) -> None:
        self._work, rows, where = work, len(work.past), launcher.device
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
        self._items = DevicePlan(
            *(torch.from_numpy(part).to(where) for part in (plan.decode, plan.prefill, plan.merges))
        )
        size = (len(order), KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self._keys, self._values = (torch.randn(size, dtype=torch.bfloat16, device=where) for _ in "kv")
        self._tables = torch.from_numpy(tables).to(where)
        self._q = torch.randn(int(starts[-1]), q_heads * HEAD_DIM, dtype=torch.bfloat16, device=where)
        self._out = torch.empty_like(self._q)
        slots = max(plan.num_slots, 1) * KV_HEADS * 16
        self._workspace = (torch.empty(slots * HEAD_DIM, device=where), torch.empty(slots, device=where))
        self._attention = PagedAttention(launcher, self._shape)

    def run(self) -> None:
        self._attention(self._out, self._q, self._keys, self._values, self._tables, self._items, self._workspace)

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The same queries, keys and values as [batch, heads, tokens, D]; None for rows of several lengths."""
        work, rows = self._work, len(self._work.past)
        if len(set(work.past)) > 1 or len(set(work.new)) > 1:
            return None
        q = self._q.view(rows, work.new[0], -1, HEAD_DIM).transpose(1, 2).contiguous()
        length = work.past[0] + work.new[0]

        def gathered(cache: torch.Tensor) -> torch.Tensor:
            pages = cache[self._tables.long()]  # [rows, blocks, heads, block, D]
            return pages.transpose(1, 2).reshape(rows, KV_HEADS, -1, HEAD_DIM)[:, :, :length].contiguous()

        return q, gathered(self._keys), gathered(self._values)

    def error(self, other: torch.Tensor) -> float:
        """Of the last run against ``other`` [batch, heads, tokens, D]: largest difference over largest value."""
        other = other.transpose(1, 2).reshape(self._out.shape).float()
        return float((self._out.float() - other).abs().max() / other.abs().max())


def torch_attention(case: PagedCase, work: Workload) -> Callable[[], torch.Tensor] | None:
    """torch's attention over rows of one length; None for skewed workloads, which it cannot batch."""
    found = case.contiguous()
    if found is None:
        return None
    q, k, v = found
    new, total = work.new[0], work.past[0] + work.new[0]
    mask = None
    if 1 < new < total:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(new, total)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=1 < new == total, enable_gqa=True)


def flex_attention(case: PagedCase, work: Workload) -> Callable[[], torch.Tensor] | None:
    """torch's FlexAttention, compiled, over rows of one length; None for skewed workloads."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    found = case.contiguous()
    if found is None:
        return None
    q, k, v = found
    past, new = work.past[0], work.new[0]

    def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
        return query + past >= key

    mask = None
    if new > 1:
        mask = create_block_mask(visible, None, None, new, past + new, device="cuda")
    torch._dynamo.reset()  # beyond a few shapes it would stop compiling, and run something else without a word
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


def median_seconds(run: Callable[[], Any], seconds: float, flush: torch.Tensor | None = None) -> float:
    """Median time of one call on the device, over about ``seconds`` of the clock; at least five calls, after three to
    warm up."""
    times: list[float] = []
    begun = time.monotonic()
    for index in range(3 + MOST_CALLS):
        if flush is not None:
            flush.zero_()
        torch.cuda._sleep(BUSY_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begun = time.monotonic()
        if len(times) >= 5 and time.monotonic() - begun >= seconds:
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


@dataclass(slots=True)
class Result:
    name: str
    microseconds: float
    rate: float  # GB/s or TFLOP/s
    share: float  # of the stream or the matrix product
    torch_microseconds: float | None = None
    torch_difference: float | None = None  # of our output from torch's, see PagedCase.error
    flex_microseconds: float | None = None

    def line(self) -> str:
        others = (("sdpa", self.torch_microseconds), ("flex", self.flex_microseconds))
        beside = "".join(f"  {name} {value:9.1f} us" for name, value in others if value is not None)
        unit = "GB/s" if self.name.startswith("decode") else "TFLOP/s"
        return f"{self.name:44} {self.microseconds:9.1f} us {self.rate:7.0f} {unit} {self.share:6.1%}{beside}"


class Bench:
    """``figures`` are what the same device reaches; results are written as they come, so that none is lost."""

    def __init__(self, launcher: Launcher, seconds: float, figures: dict[str, float], path: str | None) -> None:
        self._launcher, self._seconds, self._figures, self._path = launcher, seconds, figures, path
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.results: dict[str, Result] = {}

    def _flush_of(self, work: Workload) -> torch.Tensor | None:
        return self._flush if max(work.new) == 1 else None

    def measure(self, work: Workload) -> Result:
        """Ours, and torch's attention."""
        case, flush = PagedCase(self._launcher, work), self._flush_of(work)
        ours = median_seconds(case.run, self._seconds, flush)
        if flush is not None:
            rate, peak, unit = work.kv_bytes / ours, self._figures["stream_bytes_per_s"], 1e9
        else:
            rate, peak, unit = work.flops / ours, self._figures["product_flops"], 1e12
        result = self.results[work.name] = Result(work.name, ours * 1e6, rate / unit, rate / peak)
        result.torch_microseconds, result.torch_difference = self._other(torch_attention, case, work)
        self.write()
        return result

    def measure_flex(self, work: Workload) -> Result:
        """FlexAttention beside a result that is there: it compiles for seconds."""
        result, case = self.results[work.name], PagedCase(self._launcher, work)
        case.run()
        result.flex_microseconds, _ = self._other(flex_attention, case, work)
        self.write()
        return result

    def _other(
        self, make: Callable[[PagedCase, Workload], Callable[[], torch.Tensor] | None], case: PagedCase, work: Workload
    ) -> tuple[float | None, float | None]:
        """Microseconds and difference; None where it cannot run the workload, with one line if that was not known."""
        try:
            run = make(case, work)
            if run is None:
                return None, None
            difference = case.error(run())
            return median_seconds(run, self._seconds, self._flush_of(work)) * 1e6, difference
        except Exception as error:  # another library's failure is no reason to lose our own figures
            print(f"{work.name}: {make.__name__}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            return None, None

    def write(self) -> None:
        if self._path:
            with open(self._path, "w") as file:
                json.dump(self._figures | {"results": [asdict(r) for r in self.results.values()]}, file, indent=1)


def flex_workloads() -> list[Workload]:
    """Those beside which FlexAttention stands: each is compiled for itself."""
    decode = [w for w in decode_workloads() if w.group == 4 and len(w.past) != 64 and not w.name.startswith("decode 2")]
    return [*prefill_workloads(), *decode]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="of the clock, for each measurement")
    parser.add_argument("--flex-seconds", type=float, default=120.0, help="for FlexAttention in all; 0: without it")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    try:
        device = open_device()
    except DeviceUnavailable as error:
        print(f"bench.kernels: {error}", file=sys.stderr)
        return 2
    copy, read, product = copy_rate(options.seconds), read_rate(options.seconds), product_rate(options.seconds)
    print(
        f"{device.description()}: copy {copy / 1e9:.0f} GB/s, read {read / 1e9:.0f} GB/s, "
        f"bf16 product {product / 1e12:.0f} TFLOP/s"
    )
    figures = {
        "copy_bytes_per_s": copy,
        "read_bytes_per_s": read,
        "stream_bytes_per_s": max(copy, read),
        "product_flops": product,
    }
    bench = Bench(device.launcher, options.seconds, figures, options.json)
    for work in (*decode_workloads(), *prefill_workloads()):
        print(bench.measure(work).line(), flush=True)
    end = time.monotonic() + options.flex_seconds
    for work in flex_workloads():
        if time.monotonic() < end:
            print(bench.measure_flex(work).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
