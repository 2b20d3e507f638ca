"""Compiles every kernel for a device, in parallel, into the cache that the executor and the tests read.

usage: python -m bench.build_kernels [--arch sm_90a] [--jobs N] [--json FILE]

Without ``--arch``: for this machine's GPU, and for the interpreter that the device is compared with. A kernel that does
not compile, or whose registers spill, is named, and the exit status is 1. No GPU is needed with ``--arch``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

from executor_svc.kernels import nvrtc
from executor_svc.kernels.build import arch_of, build
from executor_svc.kernels.table import all_kernels, find_kernel

INTERPRETED = "compute_90"  # what tests/kernels/ptx runs


@dataclass(frozen=True, slots=True)
class Built:
    kernel: str
    arch: str
    seconds: float
    registers: int  # of a thread; 0 for PTX
    spill_bytes: int
    error: str = ""  # its first line

    @property
    def good(self) -> bool:
        return not self.error and not self.spill_bytes


def build_one(kernel: str, arch: str) -> Built:
    started = time.monotonic()
    try:
        log = build(find_kernel(kernel).source, [kernel], arch).log
    except nvrtc.NvrtcError as error:
        return Built(kernel, arch, time.monotonic() - started, 0, 0, "; ".join(str(error).splitlines()[:2]))
    registers = re.search(r"Used (\d+) registers", log)
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", log))
    return Built(kernel, arch, time.monotonic() - started, int(registers[1]) if registers else 0, spills)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", help="such as sm_90a")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--only", default="", metavar="WORD", help="kernels whose name has this word in it")
    parser.add_argument("--json", help="write what was built to this file")
    options = parser.parse_args()
    archs = options.arch
    if archs is None:
        import torch

        if not torch.cuda.is_available():
            print("bench.build_kernels: no usable NVIDIA GPU here; name an --arch", file=sys.stderr)
            return 2
        archs = [arch_of(torch.cuda.get_device_capability()), INTERPRETED]
    wanted = [(name, arch) for arch in archs for name in all_kernels() if options.only in name]
    started = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(build_one, *zip(*wanted, strict=True))) if wanted else []
    bad = [built for built in found if not built.good]
    for built in bad:
        print(f"{built.kernel} for {built.arch}: {built.error or f'{built.spill_bytes} bytes of spills'}")
    print(f"{len(found) - len(bad)} of {len(found)} kernels for {', '.join(archs)}: {time.monotonic() - started:.1f} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(built) for built in found], file, indent=1)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
