"""Prompts of a load, as token ids. Everything is a pure function of the seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

CASES = ("single", "batch", "prefill", "prefix", "warm")


def random_prompts(count: int, tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``tokens`` independent ids each; low ids (special tokens in most vocabularies) are left
    out where the vocabulary is large enough."""
    rng = random.Random(seed)
    low = 256 if vocab_size > 1024 else 0
    return [[rng.randrange(low, vocab_size) for _ in range(tokens)] for _ in range(count)]


def shared_prefix_prompts(
    count: int, tokens: int, prefix_tokens: int, num_prefixes: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Prompts of ``tokens`` ids whose first ``prefix_tokens`` are one of ``num_prefixes`` shared prefixes."""
    if not 0 < prefix_tokens < tokens:
        raise ValueError(f"prefix of {prefix_tokens} tokens does not fit prompts of {tokens}")
    prefixes = random_prompts(num_prefixes, prefix_tokens, vocab_size, seed)
    own = random_prompts(count, tokens - prefix_tokens, vocab_size, seed + 1)
    return [prefixes[i % num_prefixes] + own[i] for i in range(count)]


def workload_prompts(path: Path, case: str, count: int, repeat: int = 0) -> list[list[int]]:
    """Prompts of one case of a workload file: ``single``, ``batch``, ``prefill``, or ``prefix`` (prefix number
    ``repeat`` and every suffix). The cases other than ``prefix`` are varied by ``repeat`` with ``fresh``."""
    workload = json.loads(path.read_text())
    if case == "prefix":
        prefixes, suffixes = workload["prefixes"], workload["suffix"]
        prefix = fresh(prefixes[repeat % len(prefixes)], repeat // len(prefixes))
        return [prefix + suffixes[i % len(suffixes)] for i in range(count)]
    if case not in CASES:
        raise ValueError(f"workload case {case!r}: one of {', '.join(CASES)}")
    prompts = workload[case]
    return [fresh(prompts[i % len(prompts)], repeat + i // len(prompts)) for i in range(count)]


def fresh(prompt: list[int], repeat: int) -> list[int]:
    """The prompt rotated by ``repeat`` tokens: the same tokens and length, but no prefix cache can know it."""
    turn = repeat % len(prompt)
    return prompt[turn:] + prompt[:turn]


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """Send times in seconds of a Poisson process of ``rate`` requests a second."""
    rng = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times
