"""One Tokens message, the hot path of this process: thousands of ids a second pass through `deliver`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from protos import front
from protos.wire import WireError, unpack_int32
from scheduler_svc.api.refusal import Refusal
from scheduler_svc.api.stream import Stream

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def guarded(stream: Stream, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """What fails here is this stream's fault alone: it ends INTERNAL, and the others go on."""
    try:
        return act(*args, **kwargs)
    except Exception:
        log.exception("stream failed", extra={"request": stream.request.request_id})
        stream.fail(Refusal(front.INTERNAL, "internal error"))
        return None


def deliver(message: front.Tokens, streams: Mapping[int, Stream], touched: set[Stream]) -> tuple[int, int]:
    """Hands every row to its stream (``touched`` collects them). Returns the number of tokens, and of those whose
    streams are gone.

    Raises WireError before anything is delivered where the message contradicts itself.
    """
    numbers = unpack_int32(message.streams)
    tokens = unpack_int32(message.tokens)
    rows = len(numbers)
    if message.choices and len(message.choices) != rows:
        raise WireError(f"{len(message.choices)} choices for {rows} rows")
    counts = message.counts
    if (len(counts) != rows or sum(counts) != len(tokens)) if counts else rows != len(tokens):
        raise WireError(f"{len(tokens)} tokens for {rows} rows")
    if len(tokens) and int(tokens.min()) < 0:
        raise WireError("a negative token id")
    choices = message.choices or bytes(rows)
    ids = tokens.tolist()
    # Before the tokens that they belong to, so that no message is made without them.
    for number, choice, rows_data in message.logprobs:
        stream = streams.get(number)
        if stream is not None:
            guarded(stream, stream.on_logprobs, choice, rows_data)
            touched.add(stream)
    start = unclaimed = 0
    for row, number in enumerate(numbers.tolist()):
        end = start + (counts[row] if counts else 1)
        stream = streams.get(number)
        if stream is None:
            unclaimed += end - start
        else:
            stream.unlooked += end - start
            guarded(stream, stream.on_tokens, choices[row], ids[start:end])
            touched.add(stream)
        start = end
    return len(ids), unclaimed
