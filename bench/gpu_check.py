"""Everything that only a GPU can show: ``make gpu-check``, or stage by stage (``make gpu-check STAGE=tests``).

build      every kernel for this device, compiled in parallel: what follows finds them in the cache
tests      the kernel tests on the device, against float64, the CPU backend and the interpreter
services   a tiny model through both services, tokens equal to the CPU backend's in float32
kernels    bench/kernels.py: attention beside a read stream, a matrix product and torch's
decode     bench/decode.py: whole steps of Llama-8B shapes, and the idle gap between them
experts    bench/experts.py: a layer of experts beside a read stream, a matrix product and torch's
memcheck   compute-sanitizer over the kernels' own tests
racecheck  the same, for races in shared memory

A stage that fails, or takes longer than it may, does not stop the others. What is left of ``--seconds`` bounds each;
one that finds no time left is not run, and can be called alone. The state of all stages, with the end of their output,
goes to check.json in ``--out`` after each of them; figures stand beside it. The exit status is 0 when all that were
asked for passed, 1 when one did not, and 2, with one line, where there is no GPU to check.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

from executor_svc.errors import DeviceUnavailable
from executor_svc.kernels.table import all_kernels

SECONDS = 570.0  # for everything: a command of ten minutes, less its start
TAIL_LINES = 60  # of a stage's output, kept in check.json
FINDINGS = 9  # exit status of the sanitizer

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--kernels", "gpu"]
# Those whose kernels run on the device; the others test the interpreter, or the compiler.
DEVICE_TESTS = ["attention", "device", "experts", "forward", "round", "sampling_kernels", "small_kernels", "stand_in",
                "start"]  # fmt: skip
# Under the sanitizer a kernel runs up to a hundred times slower: every kernel, in small shapes.
SANITIZED = ["attention", "experts", "sampling_kernels", "small_kernels"]
NOT_SANITIZED = ["31_bits", "planted", "offsets", "what_is_read", "captured"]  # gigabytes, or not on the device
TESTING = ["pytest", "pytest_timeout", "numba", "msgspec"]  # modules
SERVICES = ["zmq", "grpc", "grpc_health", "grpc_reflection", "google.protobuf", "google.rpc", "jinja2",
            "prometheus_client", "safetensors", "tokenizers"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    seconds: float  # it may take
    command: list[str]
    needs: list[str]  # modules
    report: Path | None = None  # of the sanitizer


@dataclass(slots=True)
class Outcome:
    stage: str
    state: str  # passed, failed, timed out, not run
    why: str = ""
    seconds: float = 0.0
    status: int | None = None
    command: str = ""
    tail: list[str] = field(default_factory=list)

    def line(self) -> str:
        return f"gpu-check: {self.stage:10} {self.state}, {self.seconds:.0f} s{f': {self.why}' if self.why else ''}"


def find_sanitizer() -> str | None:
    """compute-sanitizer on the path, from the package nvidia-cuda-sanitizer-api, or in a toolkit."""
    if found := shutil.which("compute-sanitizer"):
        return found
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    candidates = [path for root in roots for path in sorted(root.glob("*/bin/compute-sanitizer"))]
    for toolkit in [
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        *map(str, sorted(Path("/usr/local").glob("cuda-*"))),
    ]:
        if toolkit:
            candidates += [Path(toolkit, "bin/compute-sanitizer"), Path(toolkit, "compute-sanitizer/compute-sanitizer")]
    return next((str(path) for path in candidates if os.access(path, os.X_OK) and path.is_file()), None)


def sanitizer(tool: str, report: Path) -> list[str]:
    """One tool over the kernels' tests, and over no kernel of torch."""
    names = sorted({name.split("<")[0] for name in all_kernels()})
    filters = [part for name in names for part in ("--kernel-name", f"kernel_substring={name}")]
    return [
        # Torch asks the driver for much that may fail, and handles it: only what kernels do counts here.
        find_sanitizer() or "compute-sanitizer", "--tool", tool, "--error-exitcode", str(FINDINGS),
        "--report-api-errors", "no", "--launch-timeout", "300", "--log-file", str(report), *filters,
        *PYTEST, "-m", "not slow", "-o", "timeout=1800", "-k", " and ".join(f"not {word}" for word in NOT_SANITIZED),
        *(f"tests/kernels/test_{name}.py" for name in SANITIZED),
    ]  # fmt: skip


def stages(out: Path) -> list[Stage]:
    python = [sys.executable, "-m"]
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") and (os.cpu_count() or 1) >= 8 else []
    tests = [f"tests/kernels/test_{name}.py" for name in DEVICE_TESTS]
    return [
        Stage("build", 120, [*python, "bench.build_kernels", "--json", str(out / "build.json")], []),
        Stage("tests", 240, [*PYTEST, *workers, "-m", "not slow", f"--junitxml={out / 'tests.xml'}", *tests], TESTING),
        Stage("services", 150, [*PYTEST, "tests/kernels/test_services.py"], [*TESTING, *SERVICES]),
        Stage("kernels", 240, [*python, "bench.kernels", "--flex-seconds", "60", "--json", str(out / "kernels.json")],
              []),
        Stage("decode", 180, [*python, "bench.decode", "--json", str(out / "decode.json")], ["msgspec", "numba"]),
        Stage("experts", 60, [*python, "bench.experts", "--json", str(out / "experts.json")], []),
        *(
            Stage(tool, 300, sanitizer(tool, out / f"{tool}.txt"), TESTING, out / f"{tool}.txt")
            for tool in ("memcheck", "racecheck")
        ),
    ]  # fmt: skip


def missing(modules: list[str]) -> list[str]:
    def there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ImportError:  # of its parent
            return False

    return [name for name in modules if not there(name)]


def run(stage: Stage, left: float) -> Outcome:
    """``left``: seconds. Its output is printed as it comes."""
    outcome = Outcome(stage.name, "not run", command=" ".join(stage.command))
    if lacking := missing(stage.needs):
        outcome.why = f"it needs {', '.join(lacking)} (docs/cuda.md)"
    elif stage.report is not None and find_sanitizer() is None:
        outcome.why = "no compute-sanitizer here (CUDA toolkit, or package nvidia-cuda-sanitizer-api)"
    elif left < 10:
        outcome.why = f"no time is left for it; alone: make gpu-check STAGE={stage.name}"
    if outcome.why:
        return outcome
    # Memory checks see bounds only where torch's cache does not pool allocations.
    environment = os.environ | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if stage.report else {})
    limit, tail = min(stage.seconds, left), deque[str](maxlen=TAIL_LINES)
    print(f"gpu-check: {stage.name}: {outcome.command}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
        stage.command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    reader = threading.Thread(target=_read, args=(process, tail), daemon=True)
    reader.start()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        process.wait()
        outcome.state, outcome.why = "timed out", f"after {limit:.0f} s; alone: make gpu-check STAGE={stage.name}"
    else:
        outcome.state = "passed" if process.returncode == 0 else "failed"
        outcome.why = _why(process.returncode)
    reader.join(5)
    outcome.seconds, outcome.status, outcome.tail = time.monotonic() - started, process.returncode, list(tail)
    if stage.report is not None and stage.report.exists():
        summaries = [line.strip("= \n") for line in stage.report.read_text().splitlines() if "SUMMARY" in line]
        outcome.why = "; ".join(filter(None, [outcome.why, *summaries]))
    return outcome


def _read(process: subprocess.Popen[str], tail: deque[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        tail.append(line.rstrip("\n"))


def _why(status: int) -> str:
    if status == 0:
        return ""
    return "the sanitizer found something" if status == FINDINGS else f"exit status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="", metavar="NAMES", help="only these, with commas between them")
    parser.add_argument("--out", type=Path, default=Path(".run/gpu-check"), help="folder of the figures")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all stages together")
    options = parser.parse_args()
    known = stages(options.out)
    names = [name for name in options.stage.replace(",", " ").split() if name]
    if unknown := set(names) - {stage.name for stage in known}:
        parser.error(f"--stage {', '.join(sorted(unknown))}: not one of {', '.join(stage.name for stage in known)}")
    end = time.monotonic() + options.seconds
    try:
        from executor_svc.backends.cuda.device import open_device

        device = open_device().description()
    except DeviceUnavailable as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    print(f"gpu-check: {device}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for stage in known:
        if names and stage.name not in names:
            continue
        outcomes.append(run(stage, end - time.monotonic()))
        print(outcomes[-1].line(), flush=True)
        found = {"device": device, "python": sys.version.split()[0], "stages": [asdict(each) for each in outcomes]}
        (options.out / "check.json").write_text(json.dumps(found, indent=1) + "\n")
    print(*(outcome.line() for outcome in outcomes), sep="\n", flush=True)
    return 0 if all(outcome.state == "passed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
