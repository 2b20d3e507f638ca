"""The sampling contract on the device: the kernels draw, the host reads what they drew a step later.

Tokens are bit for bit those of ``sampling/sampler.py`` for the same logits; logprobs are float32 sums, within 2e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from executor_svc.backends.cuda.device import Device
from executor_svc.backends.cuda.prompt_scores import DevicePromptScores, DeviceScores
from executor_svc.backends.cuda.sample_inputs import logit_arrays, num_top_of
from executor_svc.backends.cuda.staging import Landing, Readback, Staging
from executor_svc.kernels.sampling import (
    STATUS_NO_CANDIDATE,
    STATUS_OK,
    Adjusted,
    DrawRules,
    LogitRules,
    SamplingKernels,
    draw_values,
)
from executor_svc.sampling.philox import draw_bits
from executor_svc.sampling.prompt_scores import PromptScores, with_prompt
from executor_svc.sampling.rows import SampleRows
from executor_svc.sampling.sampler import FAULT_TOKEN, SamplerOutput
from protos.step import ALL_MASKED, NON_FINITE, RowFault, SlotLogprobs

Finish = Callable[[SamplerOutput, SampleRows], SamplerOutput]
_RESULT_BYTES = 12  # of a row: its token and its status


class DeviceSampler:
    """Of one device; steps of up to ``max_rows`` sampling rows take no memory but that of their logits."""

    def __init__(self, device: Device, max_rows: int) -> None:
        where = device.launcher.device
        self._kernels = SamplingKernels(device.launcher)
        self._staging = Staging(device, 128 * max_rows + 4096)  # rules of special rows may want more
        self._readback = Readback(device, 512 * max_rows)  # with 20 alternatives of each row
        self._results = torch.empty(_RESULT_BYTES * max_rows, dtype=torch.uint8, device=where)
        self._argmax = torch.empty(max_rows, dtype=torch.int64, device=where)
        self._top = torch.empty(max_rows, dtype=torch.float32, device=where)

    def sample(
        self,
        logits: torch.Tensor,
        rows: SampleRows,
        last_tokens: torch.Tensor,
        prompt: DevicePromptScores | None,
        finish: Finish,
    ) -> PendingSample:
        """``logits`` float32 [N, V] are changed. Every token goes to ``last_tokens`` at its row's slot.

        ``finish`` makes of what was sampled what the step's result says of it."""
        count, vocab = logits.shape
        tokens = self._results[: 8 * count].view(torch.int64)
        status = self._results[8 * count : _RESULT_BYTES * count].view(torch.int32)
        scored: tuple[torch.Tensor, ...] = ()
        num_top = num_top_of(rows, vocab)
        if count:
            arrays = [rows.slots, *_draws(rows), *logit_arrays(rows, vocab), *([] if num_top is None else [num_top])]
            slots, *rest = self._staging.upload(arrays)
            draws, rules = DrawRules(*rest[:5]), LogitRules(*rest[5 : len(rest) - (num_top is not None)])
            # Logprobs are of the raw logits: those rows are adjusted in a copy.
            to = logits if num_top is None else torch.empty_like(logits)
            adjusted = Adjusted(to, self._argmax[:count], self._top[:count], status)
            self._kernels.adjust(adjusted, logits, rules)
            self._kernels.draw(tokens, last_tokens, slots, adjusted, draws)
            if num_top is not None:
                scored = self._score(logits, tokens, rest[-1], int(num_top.max())).tensors
        tensors = [self._results[: _RESULT_BYTES * count], *scored, *(prompt.tensors if prompt else ())]
        return PendingSample(self._readback.copy(tensors), rows, num_top, prompt, finish)

    def score(self, logits: torch.Tensor, tokens: np.ndarray, top: int) -> DeviceScores:
        """Of raw logits float32 [n, V]: the logprobs of ``tokens`` [n] and of the ``top`` likeliest ids, in new
        tensors."""
        ids, num_top = self._staging.upload([tokens.astype(np.int64), np.full(len(tokens), top, np.int32)])
        return self._score(logits, ids, num_top, top)

    def _score(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: torch.Tensor, most: int) -> DeviceScores:
        count, width, where = len(logits), max(most, 1), logits.device
        scores = DeviceScores(
            torch.zeros(count, dtype=torch.float32, device=where),
            torch.zeros(count, dtype=torch.int32, device=where),
            torch.zeros(count, width, dtype=torch.int64, device=where),
            torch.zeros(count, width, dtype=torch.float32, device=where),
        )
        self._kernels.logprobs(*scores.tensors, logits, tokens, num_top)
        return scores

    def put_rows(self, target: torch.Tensor, rows: np.ndarray, values: torch.Tensor) -> None:
        """target[rows] = values, with ``rows`` int64 [n] from the host."""
        if len(rows):
            (index,) = self._staging.upload([rows])
            target.index_copy_(0, index, values)


@dataclass(slots=True, frozen=True)
class PendingSample:
    """One step's sampling, on its way to the host."""

    landing: Landing
    rows: SampleRows
    num_top: np.ndarray | None  # int32 [N], -1 where no logprobs are wanted; None: nowhere
    prompt: DevicePromptScores | None
    finish: Finish

    def ready(self) -> bool:
        return self.landing.ready()

    def output(self) -> SamplerOutput:
        """Waits for it. Once, in the steps' order."""
        packed, *scores = self.landing.wait()
        count, rows = len(self.rows.slots), self.rows
        tokens, status = packed[: 8 * count].view(np.int64), packed[8 * count :].view(np.int32)
        ok = status == STATUS_OK
        faults = [_fault(rows, i, int(status[i])) for i in np.flatnonzero(~ok).tolist()]
        for i, sequence in rows.special:
            if ok[i] and sequence.fault is not None:
                ok[i] = False
                error = sequence.fault
                faults.append(RowFault(sequence.slot, sequence.generation, error.status, error.detail[:4096]))
        logprobs: tuple[SlotLogprobs, ...] = ()
        if self.num_top is not None:
            logprobs = tuple(
                SlotLogprobs(
                    int(rows.slots[i]),
                    int(rows.generations[i]),
                    (DeviceScores.row(scores, i, int(self.num_top[i]), int(rows.positions[i])),),
                )
                for i in np.flatnonzero((self.num_top >= 0) & ok).tolist()
            )
            scores = scores[4:]
        tokens[~ok] = FAULT_TOKEN
        output = SamplerOutput(tokens, ok, tuple(faults), logprobs)
        if self.prompt is not None:
            found: PromptScores = self.prompt.read(scores)
            output = with_prompt(output, found, rows)
        return self.finish(output, rows)


def _draws(rows: SampleRows) -> Sequence[np.ndarray]:
    """``kernels.sampling.draw_values`` of all rows: those that draw nothing are greedy."""
    count, draws = len(rows.slots), rows.draws
    if draws is None:
        return _greedy(count)
    temperature, top_p, min_p = np.zeros(count), np.ones(count), np.zeros(count)
    top_k, bits = np.zeros(count, np.int64), np.zeros(count, np.uint64)
    at = draws.rows
    temperature[at], top_k[at], top_p[at], min_p[at] = draws.temperature, draws.top_k, draws.top_p, draws.min_p
    bits[at] = draw_bits(draws.seed, draws.choice, rows.outputs[at].astype(np.uint64))
    return draw_values(temperature, top_k, top_p, min_p, bits)


@lru_cache(maxsize=64)
def _greedy(count: int) -> Sequence[np.ndarray]:
    zeros = np.zeros(count)
    return draw_values(zeros, zeros, np.ones(count), zeros, zeros)


def _fault(rows: SampleRows, i: int, status: int) -> RowFault:
    adjusted = any(at == i and s.rules is not None and s.rules.adjusts(int(rows.outputs[i])) for at, s in rows.special)
    if status == STATUS_NO_CANDIDATE and adjusted:
        code, detail = ALL_MASKED, "no id may be drawn: every one is masked"
    else:
        code, detail = NON_FINITE, "logits of the row are not finite"
    return RowFault(int(rows.slots[i]), int(rows.generations[i]), code, detail)
