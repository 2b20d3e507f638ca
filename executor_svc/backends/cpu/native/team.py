"""Running compiled code on the threads that torch already has.

torch and numba bring a thread pool each, and two pools of spinning threads on the same cores stall each other. The
OpenMP library that torch has loaded will run any C function on its team, so there is one pool.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)


@cache
def _gomp_parallel() -> Callable[..., None] | None:
    """torch's own ``GOMP_parallel(function, data, threads, flags)``; None where its OpenMP has no such entry."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # Looked up in torch's library, so it resolves to the copy that torch itself uses.
            function = ctypes.CDLL(str(folder / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function  # type: ignore[no-any-return]
    log.warning("torch's OpenMP library is not usable: the model runs on one thread")
    return None


class Team:
    """``threads`` threads that enter one function together. The interpreter lock is released meanwhile."""

    def __init__(self, threads: int) -> None:
        self._parallel = _gomp_parallel() if threads > 1 else None
        self.threads = threads if self._parallel is not None else 1

    def run(self, function: ctypes._CFuncPtr, data: int) -> None:  # type: ignore[name-defined]
        """Call ``function(data)`` on every thread and return when all have."""
        if self._parallel is None:
            function(data)
        else:
            self._parallel(function, data, self.threads, 0)
