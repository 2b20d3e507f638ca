"""The executor's command line: every option checked before a weight is read."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from executor_svc import logs
from executor_svc.homing import REHOME_AFTER
from executor_svc.kv_memory import parse_size
from executor_svc.weights.hub import is_hub_id
from protos.link_address import check_link_address
from protos.link_keys import LinkKeys

NULL_PREFIX = "null:"
_MODEL_HELP = "Hugging Face folder, .gguf file, or hub id ORG/NAME[@REVISION]; null:VOCAB for no model"


@dataclass(slots=True, frozen=True)
class ExecutorConfig:
    model: str  # a checkpoint's path, or null:VOCAB
    scheduler: tuple[str, ...]  # addresses; one is served at a time
    name: str | None
    executor_name: str
    device: str
    weights: str
    attention: str | None
    kv_type: str | None  # of the CPU's KV cache, by the weights if None
    threads: int | None
    context_length: int | None  # tokens, all that the model is for if None
    kv_memory: int | None  # bytes
    kv_blocks: int | None
    gpu_memory_fraction: float  # of the GPU's memory
    cuda_graphs: bool
    block_size: int  # tokens
    max_slots: int
    max_batch_tokens: int
    overlap: bool
    keys: LinkKeys | None
    rehome_after: float  # seconds
    log_format: str
    log_level: str

    @property
    def null_vocab(self) -> int | None:
        """The vocabulary of the null model, if that is the one asked for."""
        return int(self.model[len(NULL_PREFIX) :]) if self.model.startswith(NULL_PREFIX) else None


def parse_args(argv: Sequence[str] | None = None) -> ExecutorConfig:
    """Exits with status 2 and one line for what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m executor_svc",
        usage="%(prog)s --model MODEL --scheduler tcp://HOST:PORT [OPTION ...]",
        description="Run a model's forward passes for a Stepwire scheduler.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=_MODEL_HELP)
    add(
        "--scheduler",
        required=True,
        action="append",
        metavar="tcp://HOST:PORT",
        help="the scheduler's executor port; may be given several times, or name a host of several addresses: one is "
        "served at a time, that which needs this executor most",
    )
    add(
        "--rehome-after",
        type=_seconds,
        default=REHOME_AFTER,
        help="with several schedulers: how long the one served last is waited for (%(default)s s)",
    )
    add("--name", metavar="MODELNAME", help="the name clients ask for (default: the file's or folder's)")
    add("--executor-name", default=socket.gethostname(), help="stable name of this executor (default: the host's)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--weights",
        choices=("bfloat16", "float16", "float32", "int8"),
        help="how weights are kept (default: float16 on cpu, bfloat16 on cuda, where cache and activations follow)",
    )
    add("--attention", choices=("numba", "torch"), help="CPU attention (default: numba where it is installed)")
    add(
        "--kv-type",
        choices=("float16", "float32"),
        help="the KV cache's elements on cpu (default: float16 with --weights int8, else float32)",
    )
    add("--threads", type=_bounded(1, 4096), help="CPU threads (default: all cores)")
    add(
        "--context-length",
        type=_bounded(1, 2**31 - 1),
        metavar="TOKENS",
        help="longest sequence served, prompt and output (default: what the model is for); models whose rope has "
        "factors for short and long contexts take the short ones up to the original context",
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--kv-memory", type=_size, metavar="SIZE", help="memory of the KV cache, as 1GiB")
    memory.add_argument("--kv-blocks", type=_bounded(1, 2**26), metavar="N", help="blocks of the KV cache")
    add(
        "--gpu-memory-fraction",
        type=_fraction,
        default=0.9,
        help="how much of the GPU's memory to use for everything, where the KV cache's size is not told (%(default)s)",
    )
    add(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run decode steps as captured graphs on cuda (default: on)",
    )
    add("--block-size", type=_bounded(1, 1024), default=16, metavar="TOKENS")
    add("--max-slots", type=_bounded(1, 65536), default=256, metavar="N", help="sequences at once")
    add("--max-batch-tokens", type=_bounded(1, 2**20), default=2048, metavar="N", help="new tokens a step")
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="hold a step's results back until the next forward was started (default: off on cpu, on on cuda)",
    )
    add("--link-secret-file", metavar="FILE", help="secret shared with the scheduler; required off loopback")
    add("--log-format", choices=logs.FORMATS, default="logfmt")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    args = parser.parse_args(argv)

    # After parsing: --help and typing mistakes need neither zmq's keys nor torch.
    from executor_svc.link_security import link_keys

    for scheduler in args.scheduler:
        try:
            check_link_address("--scheduler", scheduler)
        except ValueError as error:
            parser.error(str(error))
    if not 1 <= len(args.executor_name) <= 256:
        parser.error("--executor-name: 1 to 256 characters")
    if args.name is not None and not 1 <= len(args.name) <= 256:
        parser.error("--name: 1 to 256 characters")
    if args.model.startswith(NULL_PREFIX):
        vocab = args.model[len(NULL_PREFIX) :]
        if not vocab.isdecimal() or not 3 <= int(vocab) <= 65536:
            parser.error(f"--model {args.model}: null:VOCAB with a vocabulary of 3 to 65536")
    elif not os.path.exists(args.model) and not is_hub_id(args.model):
        parser.error(f"--model {args.model}: no such file or folder")
    if args.device == "cpu" and args.weights == "bfloat16":
        parser.error("--weights bfloat16: only with --device cuda")
    if args.device == "cuda" and args.weights == "int8":
        parser.error("--weights int8: only with --device cpu")
    if args.device == "cuda" and args.kv_type is not None:
        parser.error(f"--kv-type {args.kv_type}: only with --device cpu")
    if args.attention == "torch" and args.kv_type == "float16":
        parser.error("--kv-type float16: not with --attention torch")
    if args.device == "cuda" and args.block_size < 16:
        parser.error(f"--block-size {args.block_size}: at least 16 with --device cuda")
    try:
        # The same secret for all; where it is needed for one, it is used with all.
        keys = None
        for scheduler in args.scheduler:
            keys = link_keys(scheduler, args.link_secret_file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return ExecutorConfig(
        model=args.model,
        scheduler=tuple(args.scheduler),
        name=args.name,
        executor_name=args.executor_name,
        device=args.device,
        weights=args.weights or ("float16" if args.device == "cpu" else "bfloat16"),
        attention=args.attention,
        kv_type=args.kv_type,
        threads=args.threads,
        context_length=args.context_length,
        kv_memory=args.kv_memory,
        kv_blocks=args.kv_blocks,
        gpu_memory_fraction=args.gpu_memory_fraction,
        cuda_graphs=args.cuda_graphs,
        block_size=args.block_size,
        max_slots=args.max_slots,
        max_batch_tokens=args.max_batch_tokens,
        overlap=args.overlap if args.overlap is not None else args.device != "cpu",
        keys=keys,
        rehome_after=args.rehome_after,
        log_format=args.log_format,
        log_level=args.log_level,
    )


class _bounded:
    """An argparse type: a whole number within bounds."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not self.low <= value <= self.high:
            raise argparse.ArgumentTypeError(f"{value} is outside {self.low}..{self.high}")
        return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds")
    return value


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
