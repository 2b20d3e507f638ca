"""A mixture of experts on the device: its weights, and the kernels that run over those that a step's tokens chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor_svc.kernels.experts import ExpertKernels


@dataclass(slots=True)
class DeviceExperts:
    """[T, hidden] -> [T, hidden], in the weights' type. A row's bits do not depend on the other rows."""

    kernels: ExpertKernels
    router: torch.Tensor  # float32 [E, hidden]: it is small, and decides much
    gate_up: torch.Tensor  # [E, 2 I, hidden]
    down: torch.Tensor  # [E, hidden, I]
    padding: Callable[[], torch.Tensor | None]  # kv_slots of the step if it has padded rows: these go nowhere

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.apply(x, self.kernels.route(x, self.router, self.padding()), self.gate_up, self.down)
