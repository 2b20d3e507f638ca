"""The one exception that a checkpoint which cannot be served correctly raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(Exception):
    """A checkpoint is damaged, incomplete, or asks for something this engine does not do.

    The message names the file, tensor or setting. Nothing is guessed and nothing is skipped: a model that loads
    computes what its authors' reference implementation computes.
    """


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around code that reads settings from a file: what a value of a wrong kind makes it raise is the file's fault."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
