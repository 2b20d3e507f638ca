"""What one sequence asks of its own row beyond a plain draw: checked and unpacked once, at admission."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from executor_svc.errors import RowError
from protos.step import BAD_PARAMETER, SamplingParams
from protos.wire import LE_FLOAT32, LE_INT32, Int32

Float32 = npt.NDArray[np.float32]

GREEDY_BELOW = 1e-5  # temperatures under this bound draw nothing: argmax, lowest id on ties


@dataclass(slots=True)
class TokenCounts:
    """The distinct ids of a sequence's prompt and outputs, and how often each was an output.

    Penalties touch only these ids, so a row costs what its own history holds, not the vocabulary.
    """

    ids: Int32 = field(default_factory=lambda: np.empty(64, dtype=np.int32))
    outputs: Int32 = field(default_factory=lambda: np.zeros(64, dtype=np.int32))
    index: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: Int32, outputs: Int32) -> TokenCounts:
        counts = cls()
        for token in np.unique(prompt).tolist():
            counts._at(token)
        for token in outputs.tolist():
            counts.add_output(token)
        return counts

    def view(self) -> tuple[Int32, Int32]:
        """(ids, how often each was an output), equally long."""
        size = len(self.index)
        return self.ids[:size], self.outputs[:size]

    def add_output(self, token: int) -> None:
        at = self._at(token)  # first: it may replace the arrays
        self.outputs[at] += 1

    def _at(self, token: int) -> int:
        at = self.index.setdefault(token, len(self.index))
        if at == len(self.ids):
            self.ids = np.concatenate((self.ids, np.empty_like(self.ids)))
            self.outputs = np.concatenate((self.outputs, np.zeros_like(self.outputs)))
        self.ids[at] = token
        return at


@dataclass(slots=True)
class RowRules:
    """Unpacked parameters of a row that is not plain. All id arrays are int32 and inside the vocabulary."""

    bias_ids: Int32
    bias: Float32
    allowed: Int32
    min_tokens: int
    masked: Int32  # ids that cannot be drawn before min_tokens outputs
    repetition: float
    frequency: float
    presence: float
    logprobs: int  # -1: none
    counts: TokenCounts | None = None  # kept only where a penalty needs it

    def adjusts(self, output_position: int) -> bool:
        """True when the logits change before the draw of this output."""
        masks = len(self.masked) and output_position < self.min_tokens
        return bool(len(self.bias_ids) or len(self.allowed) or masks or self.counts is not None)


NO_RULES = RowRules(
    np.empty(0, LE_INT32), np.empty(0, LE_FLOAT32), np.empty(0, LE_INT32), 0, np.empty(0, LE_INT32), 1.0, 0.0, 0.0, -1
)


def parse_rules(params: SamplingParams, prompt: Int32, outputs: Int32, vocab_size: int) -> RowRules | None:
    """``params`` -> RowRules, or None for a plain row. Raises RowError(BAD_PARAMETER) for what cannot be honoured."""
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(params, name)):
            raise RowError(BAD_PARAMETER, f"{name} is not a finite number")
    if params.grammar:
        raise RowError(BAD_PARAMETER, "grammar: this executor does not support grammars")
    bias_ids = _ids(params.logit_bias_ids, "logit_bias_ids", vocab_size)
    if len(params.logit_bias) != 4 * len(bias_ids):
        raise RowError(BAD_PARAMETER, f"logit_bias: {len(params.logit_bias)} bytes for {len(bias_ids)} ids")
    bias = np.frombuffer(params.logit_bias, dtype=LE_FLOAT32)
    if np.isnan(bias).any() or np.isposinf(bias).any():
        raise RowError(BAD_PARAMETER, "logit_bias: NaN or infinite")
    if len(np.unique(bias_ids)) != len(bias_ids):
        raise RowError(BAD_PARAMETER, "logit_bias_ids: an id is repeated")
    allowed = _ids(params.allowed_ids, "allowed_ids", vocab_size)
    masked = _ids(params.masked_until_min_tokens, "masked_until_min_tokens", vocab_size)
    penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
    masks = params.min_tokens > 0 and len(masked) > 0
    if not (len(bias_ids) or len(allowed) or masks or penalised or params.logprobs >= 0):
        return None
    return RowRules(
        bias_ids=bias_ids,
        bias=bias,
        allowed=allowed,
        min_tokens=params.min_tokens,
        masked=masked if masks else masked[:0],
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        logprobs=params.logprobs,
        counts=TokenCounts.of(prompt, outputs) if penalised else None,
    )


def _ids(data: bytes, name: str, vocab_size: int) -> Int32:
    if len(data) % 4:
        raise RowError(BAD_PARAMETER, f"{name}: {len(data)} bytes are no int32 array")
    ids = np.frombuffer(data, dtype=LE_INT32)
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise RowError(BAD_PARAMETER, f"{name}: an id is outside the vocabulary of {vocab_size}")
    return ids
