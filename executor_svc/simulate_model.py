"""What a simulated executor has instead of a model: how long a step takes, and which token comes next.

Tokens are a pure function of (seed, choice, output position), so a request that continues elsewhere goes on with the
same ones, and a run can be compared with any other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from protos.wire import Int32

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1

Words = npt.NDArray[np.uint64]


@dataclass
class StepTimes:
    """seconds = (step + row * rows + token * prompt tokens) * a log-normal factor of spread ``jitter`` (median 1)."""

    step: float = 0.005
    row: float = 0.0
    token: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def draw(self, rows: int, prompt_tokens: int) -> float:
        seconds = self.step + self.row * rows + self.token * prompt_tokens
        return seconds * self._draw.lognormvariate(0.0, self.jitter) if self.jitter else seconds


class StepTimesError(ValueError):
    """A step-time model that is none."""


def parse_step_times(text: str, jitter: float, seed: int) -> StepTimes:
    """``STEP[,ROW[,TOKEN]]`` in milliseconds, as ``5`` or ``5,0.002,0.01``. Raises StepTimesError."""
    try:
        numbers = [float(part) / 1000.0 for part in text.split(",")]
    except ValueError:
        numbers = []
    numbers += [0.0] * (3 - len(numbers)) if numbers else []
    if len(numbers) != 3 or not all(0.0 <= number < 3600.0 for number in numbers) or not 0 <= jitter <= 10:
        raise StepTimesError(f"{text!r}: STEP[,ROW[,TOKEN]] in milliseconds, as 5 or 5,0.002,0.01")
    step, row, token = numbers
    return StepTimes(step, row, token, jitter, seed)


def mixed(words: Words) -> Words:
    """The SplitMix64 finaliser: every bit of a word decides every bit of the result."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def key(seed: int, choice: int) -> int:
    """Of a sequence: what its tokens follow from."""
    return (seed * 0x2545F4914F6CDD1D + (choice + 1) * _GOLDEN) & _MASK


def next_tokens(keys: Words, positions: Int32, vocab: int, eos: int, eos_every: int) -> Int32:
    """[S] the token at each output position. ``eos_every``: it is ``eos`` about once in so many (0: never), else any
    other id of the vocabulary."""
    words = mixed(keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    tokens = ((words >> np.uint64(33)) % np.uint64(vocab - 1)).astype(np.int32)
    tokens += tokens >= eos
    if eos_every:
        tokens[(words & np.uint64(0x1FFFFFFF)) % np.uint64(eos_every) == 0] = eos
    return tokens
