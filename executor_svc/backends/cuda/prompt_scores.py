"""Log probabilities of prompt tokens, computed on the device piece by piece and read by the host with the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from executor_svc.pieces import ScoredPart
from executor_svc.sampling.prompt_scores import PromptScores
from protos.step import RowLogprobs
from protos.wire import LE_FLOAT32, LE_INT32

if TYPE_CHECKING:
    from executor_svc.backends.cuda.sampler import DeviceSampler


@dataclass(slots=True, frozen=True)
class DeviceScores:
    """Of n rows of logits, k ids each."""

    chosen: torch.Tensor  # float32 [n]; NaN where the row's logits are not finite
    ranks: torch.Tensor  # int32 [n]
    top_ids: torch.Tensor  # int64 [n, k]
    top_values: torch.Tensor  # float32 [n, k]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return (self.chosen, self.ranks, self.top_ids, self.top_values)

    @staticmethod
    def row(arrays: Sequence[np.ndarray], i: int, top: int, position: int) -> RowLogprobs:
        """Row ``i`` of the same four on the host, with its first ``top`` ids."""
        chosen, ranks, top_ids, top_values = arrays[:4]
        return RowLogprobs(
            position=position,
            chosen=float(chosen[i]),
            rank=int(ranks[i]),
            top_ids=top_ids[i, :top].astype(LE_INT32).tobytes(),
            top_values=top_values[i, :top].astype(LE_FLOAT32).tobytes(),
        )


class DevicePromptScores:
    """Collects the scored positions of one step, whose pieces come in order."""

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        self._parts: list[tuple[ScoredPart, DeviceScores]] = []

    def add(self, logits: torch.Tensor, part: ScoredPart) -> None:
        """``logits`` float32 [count, V]: row i scores token ``part.first + i``."""
        sequence = part.scored.sequence
        tokens = sequence.tokens[part.first : part.first + part.count]
        top = min(sequence.prompt_logprobs, logits.shape[1])
        self._parts.append((part, self._sampler.score(logits, tokens, top)))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """To be read with the step; ``read`` wants them in this order."""
        return [tensor for _, scores in self._parts for tensor in scores.tensors]

    def read(self, arrays: Sequence[np.ndarray]) -> PromptScores:
        """``arrays``: what ``tensors`` held."""
        out = PromptScores()
        for n, (part, _) in enumerate(self._parts):
            own = arrays[4 * n : 4 * n + 4]
            sequence = part.scored.sequence
            wrong = np.flatnonzero(np.isnan(own[0]))
            if len(wrong):
                out.fault(sequence, f"logits at prompt position {part.first - 1 + int(wrong[0])} are not finite")
                continue
            top = min(sequence.prompt_logprobs, own[2].shape[1])
            out.extend(sequence, [DeviceScores.row(own, i, top, part.first + i) for i in range(part.count)])
        return out
