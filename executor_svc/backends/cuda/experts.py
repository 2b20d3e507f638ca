"""A mixture of experts on the device. Which experts a token goes to is never known on the host, so shapes cannot depend
on it: that would be a wait in every layer, and no graph.

Few tokens: each reads copies of its own experts' matrices. Many: every expert computes all tokens and its share of
them counts, which multiplies as often as there are experts; grouped matrix products would do without (docs/cuda.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from executor_svc.models.decoder import Apply

_COPY_COST = 3  # a copied matrix is read, written and read again


@dataclass(slots=True)
class DeviceExperts:
    """[T, hidden] -> [T, hidden], in the weights' type."""

    router: torch.Tensor  # float32 [E, hidden]: it is small, and decides much
    gate_up: torch.Tensor  # [E, 2 I, hidden]
    down: torch.Tensor  # [E, hidden, I]
    gate_up_bias: torch.Tensor | None  # [E, 2 I]
    down_bias: torch.Tensor | None  # [E, hidden]
    activate: Apply  # [T, 2 I] -> [T, I]
    per_token: int
    normalize: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self._route(x)
        if len(x) * self.per_token * _COPY_COST <= len(self.router):
            return self._by_token(x, weights, ids)
        return self._by_expert(x, weights, ids)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 [T, per_token] and ids int64 of each token's experts, ties to the lower id."""
        probabilities = F.linear(x.float(), self.router).softmax(dim=-1)
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, ids = ordered[:, : self.per_token], ids[:, : self.per_token]
        return (weights / weights.sum(dim=-1, keepdim=True) if self.normalize else weights), ids

    def _by_token(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tokens, hidden = x.shape
        flat = ids.reshape(-1)
        rows = x[:, None].expand(-1, self.per_token, -1).reshape(-1, hidden, 1)
        hidden_rows = torch.bmm(self.gate_up[flat], rows)[:, :, 0]
        if self.gate_up_bias is not None:
            hidden_rows = hidden_rows + self.gate_up_bias[flat]
        out = torch.bmm(self.down[flat], self.activate(hidden_rows)[:, :, None])[:, :, 0]
        if self.down_bias is not None:
            out = out + self.down_bias[flat]
        out = out.view(tokens, self.per_token, hidden).float() * weights[:, :, None]
        return out.sum(dim=1).to(x.dtype)

    def _by_expert(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        share = torch.zeros(len(x), len(self.router), dtype=torch.float32, device=x.device).scatter(1, ids, weights)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(len(self.router)):
            bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
            hidden = self.activate(F.linear(x, self.gate_up[expert], bias))
            out = F.linear(hidden, self.down[expert], None if self.down_bias is None else self.down_bias[expert])
            total += out.float() * share[:, expert, None]
        return total.to(x.dtype)
