"""The sampling contract in plain Python, written apart from the sampler: probabilities in float64, slow, and nothing
shared with it."""

from __future__ import annotations

import math

import numpy as np

from protos.step import SamplingParams
from protos.wire import unpack_int32


def adjusted(raw: np.ndarray, params: SamplingParams, prompt: list[int], outputs: list[int]) -> list[float]:
    """Logits after bias, allowed ids, min_tokens and penalties: float32 by the contract, each step rounded."""
    f32 = np.float32
    row = [f32(x) for x in raw]
    for token, bias in zip(
        unpack_int32(params.logit_bias_ids).tolist(), np.frombuffer(params.logit_bias, "<f4").tolist(), strict=True
    ):
        row[token] += f32(bias)
    allowed = set(unpack_int32(params.allowed_ids).tolist())
    masked = set(unpack_int32(params.masked_until_min_tokens).tolist()) if len(outputs) < params.min_tokens else set()
    for token in range(len(row)):
        if (allowed and token not in allowed) or token in masked:
            row[token] = f32(-np.inf)
    for token in set(prompt) | set(outputs):
        x = row[token]
        penalty = f32(params.repetition_penalty)
        row[token] = x / penalty if x > 0 else x * penalty
    for token in set(outputs):
        row[token] -= f32(params.frequency_penalty) * f32(outputs.count(token))
        row[token] -= f32(params.presence_penalty)
    return [float(x) for x in row]


def candidates(row: list[float], params: SamplingParams, shift: float = 0.0) -> dict[int, float]:
    """Probability of each id that may be drawn, in candidate order. ``shift`` moves every border by so much: what
    rounding may decide differs under it."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.temperature < 1e-5:
        return {order[0]: 1.0}
    top = row[order[0]]
    mass = {i: math.exp((row[i] - top) / params.temperature) for i in order}
    kept = [i for i in order if mass[i] >= params.min_p + (shift if params.min_p else 0.0)] or order[:1]
    if params.top_k:
        kept = kept[: params.top_k]
    total = math.fsum(mass[i] for i in kept)
    if params.top_p < 1.0:
        wanted = (params.top_p + shift) * total
        running = 0.0
        for n, i in enumerate(kept):
            running += mass[i]
            if running >= wanted:
                kept = kept[: n + 1]
                break
    total = math.fsum(mass[i] for i in kept)
    return {i: mass[i] / total for i in kept}


def draw(row: list[float], params: SamplingParams, bits: int, shift: float = 0.0) -> int:
    """The drawn id."""
    kept = candidates(row, params, shift)
    running = 0.0
    for i, probability in kept.items():
        running += probability
        if running > bits / 2**64 + shift:
            return i
    return i


def logprobs(raw: np.ndarray) -> tuple[list[float], list[int]]:
    """(log probability of each id, ids by rank)."""
    wide = [float(x) for x in raw]
    top = max(wide)
    log_sum = top + math.log(math.fsum(math.exp(x - top) for x in wide))
    return [x - log_sum for x in wide], sorted(range(len(wide)), key=lambda i: (-wide[i], i))


def acceptable(row: list[float], params: SamplingParams, bits: int) -> set[int]:
    """The drawn id, and what it would be were every border a hair to either side."""
    return {draw(row, params, bits, shift) for shift in (0.0, 2e-8, -2e-8)}
