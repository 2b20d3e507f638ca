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
def library(what: str) -> Iterator[None]:
    """Around the work of the ``tokenizers`` library with what a file says: it raises bare Exception, and, where it
    panics, a BaseException."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise CheckpointError(f"{what}: {error}") from error
        raise


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Around code that reads settings from a file: what a value of a wrong kind makes it raise is the file's fault."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
