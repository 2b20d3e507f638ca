"""How many prompt tokens a step may take while others decode, so that the time between two tokens stays near a target.

Two numbers are learned from every answered step of an executor: what a step of decode rows costs, and what each prompt
token adds. They rise at once and fall slowly, so a step that was too long is not repeated. Prefill always gets at
least ``LEAST_CHUNK`` tokens (or what the step's budget has left), so decode cannot starve it either.
"""

from __future__ import annotations

LEAST_CHUNK = 64  # tokens a step
_FIRST_CHUNK = 512  # before anything is known
_FALL = 0.1  # share of a lower sample that is taken over


class Pace:
    def __init__(self, target: float) -> None:
        self._target_us = 1e6 * target  # 0: no target
        self.decode_us = 0.0  # a step without prompt tokens
        self.token_us = 0.0  # each prompt token more

    def observe(self, decode_rows: int, prompt_tokens: int, round_us: int) -> None:
        """An answered step."""
        if not prompt_tokens:
            self.decode_us = _risen(self.decode_us, round_us)
            return
        alone = self.decode_us if decode_rows else 0.0
        self.token_us = _risen(self.token_us, max(0.0, round_us - alone) / prompt_tokens)

    def prompt_tokens(self, budget: int, decode_rows: int) -> int:
        """Of the tokens that the step has left, how many prefill may take."""
        if not decode_rows or self._target_us == 0.0 or budget <= LEAST_CHUNK:
            return budget
        if self.token_us == 0.0:
            return min(budget, _FIRST_CHUNK)
        fits = (self._target_us - self.decode_us) / self.token_us
        return int(min(budget, max(LEAST_CHUNK, fits)))


def _risen(old: float, sample: float) -> float:
    return sample if sample > old else old + _FALL * (sample - old)
