"""Everything that only a GPU can show, in one command: ``make gpu-check``, or ``python -m bench.gpu_check``.

1. the kernel tests on the device, against float64 and against the interpreter that runs them elsewhere
2. compute-sanitizer: memcheck and racecheck over the kernels' own tests
3. a tiny model through both services, tokens equal to the CPU backend's in float32
4. bench/kernels.py and bench/decode.py, figures to ``--out``

Each part runs even where one before it failed; the exit status is 0 when all passed, 1 when one did not, and 2, with
one line, where there is no GPU to check.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from executor_svc.errors import DeviceUnavailable

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
# Under the sanitizer a kernel runs up to a hundred times slower: every kernel, in few shapes.
SANITIZED = [
    "tests/kernels/test_small_kernels.py",
    "tests/kernels/test_sampling_kernels.py",
    "tests/kernels/test_device.py::test_attention",
]


def find_sanitizer() -> str | None:
    """compute-sanitizer on the path, in a toolkit, or from the package nvidia-cuda-sanitizer-api."""
    if found := shutil.which("compute-sanitizer"):
        return found
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    candidates = [path for root in roots for path in sorted(root.glob("*/bin/compute-sanitizer"))]
    candidates += [
        path for root in sorted(Path("/usr/local").glob("cuda*")) for path in [root / "bin/compute-sanitizer"]
    ]
    return next((str(path) for path in candidates if path.is_file()), None)


def sanitizer(tool: str) -> list[str] | None:
    """The command of one tool over the kernels' tests; None where there is no sanitizer."""
    found = find_sanitizer()
    if found is None:
        return None
    command = ["bash", found] if not os.access(found, os.X_OK) else [found]
    return [*command, "--tool", tool, "--error-exitcode", "9", *PYTEST, "--kernels", "gpu",
            "-m", "not slow", "-o", "timeout=1800", *SANITIZED]  # fmt: skip


def parts(out: Path) -> list[tuple[str, list[str] | None]]:
    """Name and command of each part, in order."""
    tests = [*PYTEST, "--kernels", "gpu", "tests/kernels"]
    return [
        ("kernel tests on the device", [*tests, "-m", "not slow"]),
        ("memcheck", sanitizer("memcheck")),
        ("racecheck", sanitizer("racecheck")),
        ("both services", [*PYTEST, "--kernels", "gpu", "tests/kernels/test_services.py"]),
        ("kernels, measured", [sys.executable, "-m", "bench.kernels", "--json", str(out / "kernels.json")]),
        ("decode steps, measured", [sys.executable, "-m", "bench.decode", "--json", str(out / "decode.json")]),
    ]


def run(name: str, command: list[str] | None) -> bool:
    if command is None:
        print(f"gpu-check: {name}: no compute-sanitizer here (CUDA toolkit, or package nvidia-cuda-sanitizer-api)")
        return False
    print(f"gpu-check: {name}: {' '.join(command)}", flush=True)
    # Memory checks see bounds only where torch's cache does not pool allocations.
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if name in ("memcheck", "racecheck") else {})
    started = time.monotonic()
    status = subprocess.run(command, env=environment, check=False).returncode
    print(f"gpu-check: {name}: {'passed' if status == 0 else f'failed with status {status}'}, "
          f"{time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".run/gpu-check"), help="folder of the figures")
    parser.add_argument("--only", metavar="WORD", help="only parts whose name has this word in it")
    options = parser.parse_args()
    try:
        from executor_svc.backends.cuda.device import open_device

        print(f"gpu-check: {open_device().description()}", flush=True)
    except DeviceUnavailable as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts(options.out) if options.only is None or options.only in part[0]]
    passed = [run(name, command) for name, command in chosen]
    for (name, _), good in zip(chosen, passed, strict=True):
        print(f"gpu-check: {'passed' if good else 'FAILED'}  {name}")
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
