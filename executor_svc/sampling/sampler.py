"""One token for each row of logits, by the sampling contract. A row's result depends on that row alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from executor_svc.sampling.adjust import adjust_rows
from executor_svc.sampling.draw import draw_rows
from executor_svc.sampling.logprobs import row_logprobs
from executor_svc.sampling.philox import draw_bits
from executor_svc.sampling.rows import DrawParams, SampleRows
from executor_svc.sampling.rules import NO_RULES, RowRules
from executor_svc.sequence import Sequence
from protos.step import ALL_MASKED, NON_FINITE, RowFault, SlotLogprobs

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

FAULT_TOKEN = 0  # stands in the device's buffer for a row that has no token: a valid id that nobody is given


@dataclass(slots=True, frozen=True)
class SamplerOutput:
    tokens: Int64  # [N]; FAULT_TOKEN where ok is False
    ok: Bool  # [N]
    faults: tuple[RowFault, ...]
    logprobs: tuple[SlotLogprobs, ...]

    def ready(self) -> bool:
        return True

    def output(self) -> SamplerOutput:
        """Itself: here already. A device's is on its way until its ``output`` is asked for."""
        return self


class Sampled(Protocol):
    """What a step's sampling left; ``output`` waits for it, if it has to: not once it is ``ready``."""

    def ready(self) -> bool: ...

    def output(self) -> SamplerOutput: ...


NOTHING_SAMPLED = SamplerOutput(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool), (), ())


def sample(logits: Float32, rows: SampleRows) -> SamplerOutput:
    """``logits`` float32 [N, V] in C order, changed in place where rows have rules -> one token or one fault a row."""
    faults: list[RowFault] = []
    tokens = logits.argmax(axis=1)  # numpy: the first of equal values, and the first NaN if there is one
    tops = logits[np.arange(len(tokens)), tokens]
    ok = np.isfinite(tops)
    if not ok.all():
        for i in np.flatnonzero(~ok).tolist():
            faults.append(_fault(rows, i, NON_FINITE, f"logits of the row are not finite ({tops[i]})"))
    raw = _apply_rules(logits, rows, tokens, tops, ok, faults) if rows.special else {}
    if rows.draws is not None:
        _draw(logits, tops, ok, rows.draws, rows, tokens)
    logprobs = tuple(_logprobs(rows, i, seq, raw[i], int(tokens[i])) for i, seq in rows.special if i in raw and ok[i])
    if faults:
        tokens[~ok] = FAULT_TOKEN
    return SamplerOutput(tokens, ok, tuple(faults), logprobs)


def _apply_rules(
    logits: Float32, rows: SampleRows, tokens: Int64, tops: Float32, ok: Bool, faults: list[RowFault]
) -> dict[int, Float32]:
    """Change the rows that have rules, and with them ``tokens``, ``tops`` and ``ok``. Returns the raw rows whose
    logprobs are wanted."""
    raw: dict[int, Float32] = {}
    adjusted: list[tuple[int, RowRules]] = []
    for i, sequence in rows.special:
        if not ok[i]:
            continue
        if sequence.fault is not None:
            ok[i] = False
            faults.append(_fault(rows, i, sequence.fault.status, sequence.fault.detail))
            continue
        rules = sequence.rules
        assert rules is not None
        adjusts = rules.adjusts(int(rows.outputs[i]))
        if rules.logprobs >= 0:
            raw[i] = logits[i].copy() if adjusts else logits[i]
        if adjusts:
            adjusted.append((i, rules))
    if adjusted:
        chosen = np.array([i for i, _ in adjusted], dtype=np.int64)
        adjust_rows(logits, chosen, [rules for _, rules in adjusted], rows.outputs, tops, tokens)
        for i in chosen[~np.isfinite(tops[chosen])].tolist():
            ok[i] = False
            if tops[i] == -np.inf:
                faults.append(_fault(rows, i, ALL_MASKED, "no id may be drawn: every one is masked"))
            else:
                faults.append(_fault(rows, i, NON_FINITE, "bias and penalties leave no finite logits"))
    return raw


def _draw(logits: Float32, tops: Float32, ok: Bool, draws: DrawParams, rows: SampleRows, tokens: Int64) -> None:
    good = ok[draws.rows]
    chosen = draws.rows[good]
    bits = draw_bits(draws.seed[good], draws.choice[good], rows.outputs[chosen].astype(np.uint64))
    tokens[chosen] = draw_rows(
        logits,
        chosen,
        tops[chosen],
        draws.temperature[good],
        draws.top_k[good],
        draws.top_p[good],
        draws.min_p[good],
        bits,
    )


def _fault(rows: SampleRows, i: int, status: int, detail: str) -> RowFault:
    return RowFault(slot=int(rows.slots[i]), generation=int(rows.generations[i]), status=status, detail=detail[:4096])


def _logprobs(rows: SampleRows, i: int, sequence: Sequence, raw: Float32, token: int) -> SlotLogprobs:
    assert sequence.rules is not None
    row = row_logprobs(raw, token, sequence.rules.logprobs, int(rows.positions[i]))
    return SlotLogprobs(slot=int(rows.slots[i]), generation=int(rows.generations[i]), rows=(row,))


def warm_up(vocab_size: int) -> None:
    """Compile (or load from numba's cache) what the first draw would otherwise wait for."""
    logits = np.zeros((1, vocab_size), dtype=np.float32)
    one = np.ones(1)
    zero = np.zeros(1, dtype=np.int64)
    bits = draw_bits(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.zeros(1, np.uint64))
    draw_rows(logits, zero, logits[:, 0], one, zero + 1, one * 0.5, one * 0.0, bits)
    row_logprobs(logits[0], 0, 1, 0)
    adjust_rows(logits, zero, [NO_RULES], zero, logits[:, 0].copy(), zero.copy())
