"""Mixtures of experts on a GPU: one layer's kernels, as shares of what the same device reaches in the same run.

usage: python -m bench.experts [--seconds 0.3] [--json FILE]

Random weights of Mixtral 8x7B and Qwen3-30B-A3B shapes in bf16; routing included. Decode is measured in the bytes of
the experts that its tokens chose, each once, beside a read stream, with the L2 cache flushed; prompts in multiply-adds,
beside a bf16 matrix product. torch's grouped products stand beside, over rows that are sorted already: the two products
and the activation alone. Without a GPU it ends with one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from bench.kernels import FLUSH_BYTES, copy_rate, median_seconds, product_rate, read_rate
from executor_svc.backends.cuda.device import open_device
from executor_svc.errors import DeviceUnavailable
from executor_svc.kernels.experts import ExpertKernels, ExpertShape, Routing
from executor_svc.kernels.launch import Launcher

SHAPES = {
    "Mixtral 8x7B": ExpertShape(torch.bfloat16, 4096, 14_336, 8, 2, True),
    "Qwen3-30B-A3B": ExpertShape(torch.bfloat16, 2048, 768, 128, 8, True),
}
DECODE, PROMPTS = (1, 8, 32, 64, 256), (1024, 8192)  # tokens


class Layer:
    """Weights on the device, and tokens that go where random logits send them."""

    def __init__(self, launcher: Launcher, shape: ExpertShape, tokens: int) -> None:
        self._shape = shape

        def random(*size: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
            return torch.randn(size, dtype=dtype, device=launcher.device).mul_(size[-1] ** -0.5)

        self._x = random(tokens, shape.hidden).mul_(shape.hidden**0.5)
        self._router = random(shape.experts, shape.hidden, dtype=torch.float32)
        self._gate_up = random(shape.experts, 2 * shape.intermediate, shape.hidden)
        self._down = random(shape.experts, shape.hidden, shape.intermediate)
        self._kernels = ExpertKernels(launcher, shape)
        self.routing: Routing = self._kernels.route(self._x, self._router)

    def run(self) -> torch.Tensor:
        self.routing = self._kernels.route(self._x, self._router)
        return self._kernels.apply(self._x, self.routing, self._gate_up, self._down)

    def used_bytes(self) -> int:
        """Of the matrices of experts that somebody chose."""
        shape = self._shape
        return int(self.routing.ids.unique().numel()) * 3 * shape.intermediate * shape.hidden * shape.dtype.itemsize

    def flops(self) -> int:
        """Of the products, a multiply-add counted as two."""
        return 6 * self.routing.ids.numel() * self._shape.intermediate * self._shape.hidden

    def torch_products(self) -> Callable[[], torch.Tensor]:
        """The same rows through torch's grouped products. -> parts, in the order of places"""
        ids = self.routing.ids.flatten()
        order = ids.argsort(stable=True)
        rows = self._x[order // self._shape.per_token]
        ends = ids.bincount(minlength=self._shape.experts).cumsum(0).to(torch.int32)

        def run() -> torch.Tensor:
            gate, up = F.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
            return F.grouped_mm(F.silu(gate) * up, self._down.transpose(1, 2), offs=ends)

        return run


@dataclass(slots=True)
class Result:
    name: str
    microseconds: float
    share: float  # of the read stream (decode) or the matrix product
    torch_microseconds: float | None = None


def measure(
    launcher: Launcher, name: str, tokens: int, seconds: float, stream: float, product: float, flush: torch.Tensor
) -> Result:
    layer = Layer(launcher, SHAPES[name], tokens)
    decode = tokens in DECODE
    cold = flush if decode else None
    ours = median_seconds(layer.run, seconds, cold)
    least = layer.used_bytes() / stream if decode else layer.flops() / product
    result = Result(f"{name}, {tokens} tokens", ours * 1e6, least / ours)
    try:
        result.torch_microseconds = median_seconds(layer.torch_products(), seconds, cold) * 1e6
    except Exception as error:  # another library's failure is no reason to lose our own figures
        print(f"{result.name}: torch: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="of the clock, for each measurement")
    parser.add_argument("--json", help="write all figures to this file")
    options = parser.parse_args()
    try:
        device = open_device()
    except DeviceUnavailable as error:
        print(f"bench.experts: {error}", file=sys.stderr)
        return 2
    stream, product = max(copy_rate(0.3), read_rate(0.3)), product_rate(0.3)
    print(f"{device.description()}: stream {stream / 1e9:.0f} GB/s, bf16 product {product / 1e12:.0f} TFLOP/s")
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    results = []
    for name in SHAPES:
        for tokens in (*DECODE, *PROMPTS):
            result = measure(device.launcher, name, tokens, options.seconds, stream, product, flush)
            results.append(result)
            beside = "" if result.torch_microseconds is None else f"  torch {result.torch_microseconds:9.1f} us"
            print(f"{result.name:32} {result.microseconds:9.1f} us {result.share:6.1%}{beside}", flush=True)
            if options.json:  # each at once: a run that is stopped loses none
                figures = {"stream_bytes_per_s": stream, "product_flops": product}
                with open(options.json, "w") as file:
                    json.dump(figures | {"results": [asdict(r) for r in results]}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
