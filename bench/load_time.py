"""How long a GGUF model takes to load, against reading its bytes and dequantising them with numpy alone.

``python -m bench.load_time --model PATH [--weights float16] [--rounds 5] [--json FILE]``: both in turns, each in a
process of its own, imports and compiled code warm. Wall and processor time; the best round of each counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

DEFAULT_MODEL = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")


def load(path: Path, weights: str) -> dict[str, float]:
    """From the path to a model that can run."""
    from executor_svc.models.load import load_model
    from executor_svc.weights import gguf_file, hf_folder  # noqa: F401 - imported before the clock starts

    return _timed(lambda: load_model(path, weights=weights))


def numpy_alone(path: Path) -> dict[str, float]:
    """Every tensor's bytes, read and dequantised by the ``gguf`` library whole; the header is known."""
    import numpy as np
    from gguf.quants import dequantize

    from executor_svc.weights.gguf_header import read_header

    infos = read_header(path).tensors.values()

    def read() -> None:
        for info in infos:
            dequantize(np.fromfile(path, np.uint8, info.size, offset=info.offset), info.kind)

    return _timed(read)


def _timed(run: object) -> dict[str, float]:
    assert callable(run)
    run()  # compiled code and the page cache are warm
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}


def measure(model: Path, weights: str, rounds: int) -> dict[str, object]:
    """Seconds of each, the best of ``rounds``, and the ratios."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for which in ("load", "numpy"):
            command = [sys.executable, "-m", "bench.load_time", "--one", which, "--model", str(model)]
            done = subprocess.run([*command, "--weights", weights], check=True, stdout=subprocess.PIPE, text=True)
            seconds = json.loads(done.stdout)
            known = best.setdefault(which, seconds)
            best[which] = {clock: min(known[clock], seconds[clock]) for clock in known}
    ratio = {clock: best["load"][clock] / best["numpy"][clock] for clock in best["load"]}
    return {"model": model.name, "weights": weights, "rounds": rounds, "seconds": best, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--weights", default="float16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", choices=("load", "numpy"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(load(args.model, args.weights) if args.one == "load" else numpy_alone(args.model)))
        return
    result = measure(args.model, args.weights, args.rounds)
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
