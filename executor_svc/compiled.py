"""numba functions whose machine code is kept on disk where that is possible.

Kept code saves seconds of a start and is never a condition of one. numba itself refuses to load a function where no
folder can be written (an installation of another user, no home), and raises where the disk is full.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def kept_njit(**options: Any) -> Callable[[F], F]:
    """``numba.njit(cache=True, **options)``, but what goes wrong with the cache costs a compilation at most."""

    def decorate(function: F) -> F:
        compiled = numba.njit(**options)(function)
        try:
            compiled._cache = _Cache(function)  # what ``enable_caching`` does
        except RuntimeError:
            _warn("compiled code is not kept: no folder can be written")
        return compiled

    return decorate


class _Cache(FunctionCache):
    def load_overload(self, *args: Any) -> Any:
        try:
            return super().load_overload(*args)
        except Exception as error:  # a damaged file: unpickling raises anything
            _warn(f"compiled code cannot be read: {self.cache_path}: {str(error) or type(error).__name__}")
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, *args: Any) -> None:
        try:
            super().save_overload(*args)
        except OSError as error:
            _warn(f"compiled code is not kept: {self.cache_path}: {error.strerror}")


@cache
def _warn(reason: str) -> None:
    """Once for each reason."""
    log.warning("%s (NUMBA_CACHE_DIR names another folder)", reason)
