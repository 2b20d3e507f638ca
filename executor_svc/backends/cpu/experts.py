"""A mixture of experts in plain torch: each token's MLP output is a weighted sum over the few experts it is sent to.

Batch invariant: a router row depends on its token alone, an expert's rows go through the same tiled products whatever
their number, and a token's experts are added up in the order of their rank, not in that of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from executor_svc.backends.cpu.exact import exact_exp, exact_sum

Apply = Callable[[torch.Tensor], torch.Tensor]  # [M, K] -> [M, N], M a multiple of the row tile


def route(logits: torch.Tensor, count: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` likeliest experts of each token, by softmax over all of them, ties to the lower id.

    float32 [T, E] -> weights float32 [T, count], descending, and ids int64 [T, count]. ``normalize``: the weights are
    divided by their sum.
    """
    exponentials = exact_exp(logits - logits.amax(dim=-1, keepdim=True))
    probabilities = exponentials / exact_sum(exponentials)
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = ordered[:, :count], ids[:, :count]
    return weights / exact_sum(weights) if normalize else weights, ids


@dataclass(slots=True)
class Experts:
    """float32 [T, hidden] -> [T, hidden], T a multiple of ``row_tile``."""

    router: Apply  # [E, hidden]
    gate_up: list[Apply]  # of each expert, [2 I, hidden]
    down: list[Apply]  # of each expert, [hidden, I]
    activate: Apply  # [T, 2 I] -> [T, I]
    per_token: int
    normalize: bool
    row_tile: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = route(self.router(x), self.per_token, self.normalize)
        parts = x.new_empty(len(x), self.per_token, x.shape[1])
        for expert in ids.unique().tolist():
            tokens, ranks = (ids == expert).nonzero(as_tuple=True)
            rows = F.pad(x[tokens], (0, 0, 0, -len(tokens) % self.row_tile))
            out = self.down[expert](self.activate(self.gate_up[expert](rows)))[: len(tokens)]
            parts[tokens, ranks] = out * weights[tokens, ranks, None]
        total = parts[:, 0]
        for rank in range(1, self.per_token):
            total = total + parts[:, rank]
        return total.contiguous()
