"""One Tokens message, the hot path of this process: thousands of ids a second pass through `deliver`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import numpy as np

from protos import front
from protos.wire import WireError, pack_int32, unpack_int32
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


def deliver(
    message: front.Tokens,
    streams: Mapping[int, Stream],
    send: Callable[[front.ToCore], None],
    touched: set[Stream],
) -> int:
    """Hands every row to its stream (``touched`` collects them), tells the core where stop strings were found (Stop)
    and how far none was (one Seen for all). Returns the number of tokens; rows of streams that are gone count too.

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
    seen: list[tuple[int, int, int]] = []
    start = 0
    for row, number in enumerate(numbers.tolist()):
        end = start + (counts[row] if counts else 1)
        stream = streams.get(number)
        if stream is not None:
            choice = choices[row]
            ended = guarded(stream, stream.on_tokens, choice, ids[start:end])
            touched.add(stream)
            if stream.request.stops is not None and stream.error is None:
                if ended is not None:
                    send(front.Stop(number, choice, stream.outputs(choice)))
                elif (outputs := stream.seen(choice)) >= 0:
                    seen.append((number, choice, outputs))
        start = end
    if seen:
        table = np.asarray(seen, dtype=np.int32).T
        send(front.Seen(pack_int32(table[0]), pack_int32(table[1]), pack_int32(table[2])))
    return len(ids)
