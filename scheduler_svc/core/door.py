"""What is refused before it becomes a stream, with the field, the value and the limit."""

from __future__ import annotations

import math

import numpy as np

from protos import front
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.models import ModelEntry
from scheduler_svc.prefix_hash import HASH_BYTES

_ONE_CHOICE = front.Choice(0)
_UINT32 = np.dtype("<u4")


class Refusal(Exception):
    """Carries the Rejected to send."""

    def __init__(
        self, code: int, message: str, field: str = "", value: object = "", limit: object = "", retry_after: float = 0.0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.value = str(value)
        self.limit = str(limit)
        self.retry_after = retry_after

    def rejected(self, stream: int) -> front.Rejected:
        return front.Rejected(
            stream=stream,
            code=self.code,
            message=str(self),
            field=self.field,
            value=self.value[:256],
            limit=self.limit,
            retry_after=self.retry_after,
        )


def token_limit(submit: front.Submit, model: ModelEntry, config: CoreConfig, now: float) -> int:
    """Check a Submit against its model. Returns the most tokens of a sequence of it, prompt and outputs together.

    A sequence may end at the context's end (LENGTH). It is refused if no known executor could hold what it asks for.
    """
    if not math.isfinite(submit.arrival + submit.deadline):
        for field, time in (("arrival", submit.arrival), ("deadline", submit.deadline)):
            if not math.isfinite(time):
                raise Refusal(front.INVALID_ARGUMENT, f"{field} is not a time", field, time)
    if 0.0 < submit.deadline <= now:
        raise Refusal(front.DEADLINE_EXCEEDED, "the deadline passed", "deadline", submit.deadline, now)
    if submit.sampling.grammar:
        raise Refusal(front.INVALID_ARGUMENT, "grammars are not supported", "grammar", submit.sampling.grammar)
    prompt_tokens = _check_ids("prompt", submit.prompt, model)
    if prompt_tokens == 0:
        raise Refusal(front.INVALID_ARGUMENT, "the prompt is empty", "prompt", 0, 1)
    if submit.stop_ids:
        _check_ids("stop_ids", submit.stop_ids, model)
    most_outputs = 0
    if len(submit.choices) > 1 or submit.choices[0] != _ONE_CHOICE:
        most_outputs = max([_check_ids("outputs", choice.outputs, model) for choice in submit.choices])
        indices = [choice.index for choice in submit.choices]
        if max(indices) > 255 or len(set(indices)) != len(indices):
            text = "choice indices must differ and be below 256"
            raise Refusal(front.INVALID_ARGUMENT, text, "choices", indices, 255)
    hashes = len(submit.block_hashes)
    if hashes and hashes != HASH_BYTES * (prompt_tokens // model.block_size):
        expected = HASH_BYTES * (prompt_tokens // model.block_size)
        raise Refusal(front.INVALID_ARGUMENT, f"{hashes} bytes of hashes", "block_hashes", hashes, expected)

    largest = model.max_sequence_tokens or model.card.context_length  # nobody known: judged when one is
    if prompt_tokens + 1 > largest:
        raise Refusal(
            front.INVALID_ARGUMENT,
            f"the prompt's {prompt_tokens} tokens and one of output do not fit: an executor of {model.name!r} holds "
            f"at most {largest} tokens of a request",
            "prompt",
            prompt_tokens,
            largest - 1,
        )
    wanted = prompt_tokens + submit.max_tokens if submit.max_tokens else model.context_length
    wanted = min(wanted, model.context_length)
    if wanted > largest:
        if submit.max_tokens:
            raise Refusal(
                front.INVALID_ARGUMENT,
                f"{prompt_tokens} prompt tokens and max_tokens {submit.max_tokens} do not fit: an executor of "
                f"{model.name!r} holds at most {largest} tokens of a request",
                "max_tokens",
                submit.max_tokens,
                largest - prompt_tokens,
            )
        wanted = largest
    if prompt_tokens + most_outputs > wanted:
        raise Refusal(
            front.INVALID_ARGUMENT,
            f"{most_outputs} outputs to continue from are more than the {wanted - prompt_tokens} that are allowed",
            "outputs",
            most_outputs,
            wanted - prompt_tokens,
        )
    return wanted


def check_queue(submit: front.Submit, model: ModelEntry, config: CoreConfig) -> None:
    """New work is refused when too much waits; continuations pass."""
    if submit.continuation:
        return
    waiting = len(model.queue)
    if waiting + len(submit.choices) > config.max_waiting:
        raise Refusal(
            front.RESOURCE_EXHAUSTED,
            f"{waiting} sequences wait for {model.name!r} already",
            "queue",
            waiting,
            config.max_waiting,
            retry_after=config.queue_retry_after,
        )


def _check_ids(field: str, data: bytes, model: ModelEntry) -> int:
    """The number of ids, each inside the vocabulary."""
    if not data:
        return 0
    if len(data) % 4:
        raise Refusal(front.INVALID_ARGUMENT, f"{len(data)} bytes of ids: not a multiple of 4", field)
    ids = np.frombuffer(data, dtype=_UINT32)  # unsigned: a negative id is outside too
    if ids.item(ids.argmax()) >= model.vocab_size:  # for a short prompt less than half the price of max()
        bad = int(ids[ids >= model.vocab_size][0].astype(np.int32))
        message = f"token id {bad} is outside the vocabulary of {model.vocab_size}"
        raise Refusal(front.INVALID_ARGUMENT, message, field, bad, model.vocab_size - 1)
    return len(ids)
