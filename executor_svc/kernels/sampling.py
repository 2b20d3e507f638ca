"""Launches of the sampling kernels: adjusted logits, the draw, log-probabilities. Logits are float32 [S, vocab]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.kernels.launch import Launcher
from executor_svc.sampling.exp2 import EXP2, STEPS_PER_E

STATUS_OK, STATUS_NON_FINITE, STATUS_NO_CANDIDATE = 0, 1, 2
MAX_VOCAB = 1 << 24  # an id has 24 bits in a candidate's key
_MAX_WEIGHT = 1 << 38


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What changes the raw logits, on the device. Entries of row r stand at [starts[r], starts[r + 1]), int32 [S + 1];
    no id stands twice in a row."""

    bias_starts: torch.Tensor
    bias_ids: torch.Tensor  # int32
    bias_values: torch.Tensor  # float32; -inf bans an id
    history_starts: torch.Tensor
    history_ids: torch.Tensor  # int32, every id of prompt and output
    history_counts: torch.Tensor  # int32, times in the output
    penalties: torch.Tensor  # float32 [S, 3]: repetition, frequency, presence
    grammar_mask: torch.Tensor | None = None  # int32 [masks, ceil(vocab / 32)], a set bit allows
    grammar_rows: torch.Tensor | None = None  # int32 [S], -1: none


@dataclass(frozen=True, slots=True)
class DrawRules:
    """How each row is drawn, on the device; ``draw_values`` makes it."""

    factor: torch.Tensor  # float64 [S], 0: greedy
    least: torch.Tensor  # int64 [S], smallest weight that stays
    top_k: torch.Tensor  # int32 [S], 0: off
    top_p: torch.Tensor  # float64 [S], 1: off
    bits: torch.Tensor  # uint64 [S]


def draw_values(
    temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, bits: np.ndarray
) -> list[np.ndarray]:
    """The fields of ``DrawRules`` on the host. All [S]; ``temperature`` 0 is greedy; ``bits`` from
    ``philox.draw_bits``."""
    heat = temperature.astype(np.float64)
    factor = np.divide(STEPS_PER_E, heat, out=np.zeros_like(heat), where=heat > 0)
    least = np.maximum(1, np.ceil(min_p.astype(np.float64) * _MAX_WEIGHT)).astype(np.int64)
    return [factor, least, top_k.astype(np.int32), top_p.astype(np.float64), bits.astype(np.uint64)]


@dataclass(frozen=True, slots=True)
class Adjusted:
    """What ``adjust`` leaves: logits float32 [S, vocab], and of each row the greedy token int64 (0 where the status is
    not 0), its logit float32 and the status int32."""

    logits: torch.Tensor
    argmax: torch.Tensor
    top: torch.Tensor
    status: torch.Tensor


class SamplingKernels:
    def __init__(self, launcher: Launcher) -> None:
        self._adjust = launcher.kernel("adjust_logits")
        self._sample = launcher.kernel("sample_rows")
        self._logprobs = launcher.kernel("logprobs")
        self._table = torch.from_numpy(EXP2).to(launcher.device)  # float64 [64]: 2**(j/64)

    def adjust(self, out: Adjusted, logits: torch.Tensor, rules: LogitRules) -> None:
        """Bias and bans, penalties, grammar mask, in this order; then each row's largest logit and its status."""
        rows, vocab = logits.shape
        if vocab > MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab}; at most {MAX_VOCAB} is supported")
        if (rules.grammar_mask is None) != (rules.grammar_rows is None):
            raise ValueError("a grammar mask and its rows are given together")
        if rows:
            args = (
                out.logits, out.argmax, out.top, out.status, logits, rules.bias_starts, rules.bias_ids,
                rules.bias_values, rules.history_starts, rules.history_ids, rules.history_counts, rules.penalties,
                rules.grammar_mask, rules.grammar_rows, np.int32(vocab),
            )  # fmt: skip
            self._adjust((rows,), (512,), args)

    def draw(
        self, tokens: torch.Tensor, last_tokens: torch.Tensor, slots: torch.Tensor, adjusted: Adjusted, rules: DrawRules
    ) -> None:
        """Each row's token goes to ``tokens`` int64 [S] and, where ``slots`` int32 [S] is not -1, to ``last_tokens``
        int64 [slots]."""
        rows, vocab = adjusted.logits.shape
        if rows:
            args = (
                tokens, last_tokens, adjusted.logits, adjusted.argmax, adjusted.top, adjusted.status, slots,
                rules.factor, rules.least, rules.top_k, rules.top_p, rules.bits, self._table, np.int32(vocab),
            )  # fmt: skip
            self._sample((rows,), (512,), args)

    def logprobs(
        self,
        chosen: torch.Tensor,
        ranks: torch.Tensor,
        top_ids: torch.Tensor,
        top_logprobs: torch.Tensor,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        num_top: torch.Tensor,
    ) -> None:
        """Of the raw ``logits``: ``chosen`` float32 [S] and ``ranks`` int32 [S] (1: most likely) of ``tokens``, and the
        ``num_top`` int32 [S] most likely ids in ``top_ids`` int64 and ``top_logprobs`` float32 [S, max]; -1: no row."""
        rows, vocab = logits.shape
        if rows:
            sizes = (np.int32(top_ids.shape[1]), np.int32(vocab))
            self._logprobs((rows,), (512,), (chosen, ranks, top_ids, top_logprobs, logits, tokens, num_top, *sizes))
