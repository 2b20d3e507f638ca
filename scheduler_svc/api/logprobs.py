"""Log probabilities on their way to one client: kept by position, handed out in order and exactly once.

Rows may come twice: a preempted sequence computes its prompt again, and the choices of a request all compute the same
one. What was handed out, or is past the end of the text, is dropped here; what should be there and is not is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from protos.step import RowLogprobs
from protos.stepwire.v1 import inference_pb2 as pb
from protos.wire import LE_FLOAT32, Int32, WireError, unpack_int32

_decode = msgspec.msgpack.Decoder(tuple[RowLogprobs, ...], strict=True).decode

VALUES = 4096  # made at once, at most: a few milliseconds; of a prompt, those of one message


class MissingLogprobs(Exception):
    """A token was to be sent whose log probability never came."""


class Logprobs:
    """Of one request: of its prompt, where ``prompt_top`` is not negative, and of each choice's outputs."""

    def __init__(self, prompt: Int32, top: int, prompt_top: int) -> None:
        self.wanted = top >= 0
        self._prompt = prompt
        self._prompt_rows: dict[int, RowLogprobs] = {}
        self._next = 1 if prompt_top >= 0 else len(prompt)  # prompt position to be handed out next
        self._chunk = max(1, VALUES // (1 + max(prompt_top, 0)))
        self.outputs_at_once = max(1, VALUES // (1 + max(top, 0)))
        self._outputs: dict[int, dict[int, RowLogprobs]] = {}  # choice -> output index -> row

    @property
    def prompt_pending(self) -> bool:
        """Some of the prompt were not handed out yet."""
        return self._next < len(self._prompt)

    @property
    def prompt_messages(self) -> int:
        """Calls of ``take_prompt`` that hand out the rest of them."""
        return -(-(len(self._prompt) - self._next) // self._chunk)

    @property
    def prompt_here(self) -> bool:
        """All that were not handed out have come."""
        return len(self._prompt_rows) >= len(self._prompt) - self._next

    def add(self, choice: int, data: bytes) -> None:
        """The rows of one choice, as the core sends them. Raises WireError."""
        try:
            rows = _decode(data)
        except msgspec.DecodeError as error:
            raise WireError(str(error)) from error
        start = len(self._prompt)
        for row in rows:
            if len(row.top_ids) != len(row.top_values):
                raise WireError("alternatives of different numbers")
            if row.position >= start:
                if self.wanted:
                    self._outputs.setdefault(choice, {})[row.position - start] = row
            elif row.position >= self._next:
                self._prompt_rows[row.position] = row

    def take_prompt(self) -> list[pb.TokenLogprob]:
        """The next ones of the prompt that have come, a message's worth at most."""
        found: list[pb.TokenLogprob] = []
        while len(found) < self._chunk and self.prompt_pending and (row := self._prompt_rows.pop(self._next, None)):
            found.append(_message(int(self._prompt[self._next]), row))
            self._next += 1
        return found

    def take(self, choice: int, first: int, ids: Sequence[int]) -> list[pb.TokenLogprob]:
        """Those of outputs ``first``... of a choice, whose ids are ``ids``. Raises MissingLogprobs."""
        if not self.wanted or not ids:
            return []
        rows = self._outputs.get(choice, {})
        found = []
        for index, token in enumerate(ids, first):
            row = rows.pop(index, None)
            if row is None:
                raise MissingLogprobs(f"no log probability came for output {index} of choice {choice}")
            found.append(_message(token, row))
        return found


def _message(token: int, row: RowLogprobs) -> pb.TokenLogprob:
    message = pb.TokenLogprob(token_id=token, logprob=row.chosen, rank=row.rank)
    if row.top_ids:
        values = np.frombuffer(row.top_values, dtype=LE_FLOAT32).tolist()
        for top, value in zip(unpack_int32(row.top_ids).tolist(), values, strict=True):
            message.top.add(token_id=top, logprob=value)
    return message
