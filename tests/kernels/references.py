"""What the kernels should compute, in float64 and in the plainest way."""

from __future__ import annotations

import numpy as np
import torch


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """One row: q [n, q_heads, D] at positions past..., keys and values [past + n, kv_heads, D] -> [n, q_heads, D]."""
    n, q_heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    q, keys, values = q.double().view(n, kv_heads, -1, head_dim), keys.double(), values.double()
    scores = torch.einsum("nhgd,thd->nhgt", q, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at, key = past + torch.arange(n)[:, None], torch.arange(len(keys))
    visible = key <= at
    if window > 0:
        visible &= key > at - window
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    return torch.einsum("nhgt,thd->nhgd", scores.softmax(dim=-1), values).reshape(n, q_heads, head_dim)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * (weight.double() + offset)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], rope [T, rotary]: the halves of the first ``rotary`` elements rotate."""
    x, half = x.double(), rope.shape[1] // 2
    cos, sin = rope.double()[:, None, :half], rope.double()[:, None, half:]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


def weights(logits: np.ndarray, temperature: float) -> list[int]:
    """round(exp((logit - max) / temperature) * 2**38), by the contract's table and polynomial, one id at a time."""
    top, factor = float(logits.max()), (64 / np.log(2.0)) / temperature
    result = []
    for logit in logits.tolist():
        steps = (logit - top) * factor
        if not steps > -40 * 64:
            result.append(0)
            continue
        n = int(np.floor(steps))
        x = (steps - n) * (np.log(2.0) / 64)
        p = 1.0 + x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0))))
        result.append(int(_TABLE[n & 63] * p * 2.0 ** (38 + (n >> 6)) + 0.5))
    return result


def draw(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, bits: int) -> int:
    """The contract of executor_svc/sampling/draw.py by one full sort."""
    least = max(1, int(np.ceil(min_p * 2.0**38)))
    candidates = [(-w, i) for i, w in enumerate(weights(logits, temperature)) if w >= least]
    candidates.sort()
    if top_k > 0:
        candidates = candidates[:top_k]
    if top_p < 1.0:
        total = -sum(w for w, _ in candidates)
        wanted = min(max(1, int(np.ceil(top_p * float(total)))), total)
        held = kept = 0
        while held < wanted:
            held -= candidates[kept][0]
            kept += 1
        candidates = candidates[:kept]
    target = bits * -sum(w for w, _ in candidates) >> 64
    for weight, index in candidates:
        target += weight
        if target < 0:
            return index
    raise AssertionError("the target is below the mass")


def _table() -> list[float]:
    from executor_svc.sampling.exp2 import EXP2

    return EXP2.tolist()


_TABLE = _table()


def route(x: torch.Tensor, router: torch.Tensor, per_token: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each token, ties to the lower id: weights float64 and ids int64 [T, per_token]."""
    probabilities = (x.double() @ router.double().T).softmax(dim=1)
    ordered, ids = probabilities.sort(dim=1, descending=True, stable=True)
    weights, ids = ordered[:, :per_token], ids[:, :per_token]
    return (weights / weights.sum(dim=1, keepdim=True) if normalize else weights), ids


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """x [T, hidden], ids and weights [T, per_token], gate_up [E, 2 I, hidden], down [E, hidden, I] -> [T, hidden]."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += share * (down[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return out
