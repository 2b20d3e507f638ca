"""The threads that run a step together: the caller, and helpers that join when they can.

The caller never waits for a helper that has not come: it runs all phases itself and takes whatever items nobody took
(``phases``). So a helper that the system does not schedule costs its share of the work, not a time slice at every
barrier, which on a busy machine is what an OpenMP team costs. Each step has a ``Context`` of its own; a helper that
arrives late finds the tickets of an old context used up and leaves, so a context is reused only when all have left.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from executor_svc.backends.cpu.native.layout import PRELUDE_OFFSET, YIELD_OFFSET

_SCHED_YIELD = int(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0)


class Context:
    """The step table and counters of one step; ``inside`` helpers may still read them, and what the table points to
    outside the items' data: ``kept`` keeps that alive until they have left."""

    def __init__(self, step_size: int, counter_size: int, kept: tuple[object, ...]) -> None:
        self.kept = kept
        self.step: npt.NDArray[np.int64] = np.zeros(step_size, np.int64)
        self.counters: npt.NDArray[np.int64] = np.zeros(counter_size, np.int64)
        self.inside = 0


class Team:
    """``threads - 1`` helper threads and the caller. ``function(step address)`` releases the interpreter lock."""

    def __init__(
        self, function: Callable[[int], None], threads: int, step_size: int, counter_size: int, kept: tuple[object, ...]
    ) -> None:
        self.threads = threads
        self._function = function
        self._new_context = step_size, counter_size, kept
        self._state = _State()
        for index in range(threads - 1):
            thread = threading.Thread(
                target=_help, args=(self._state, function), name=f"stepwire-helper-{index}", daemon=True
            )
            thread.start()
        weakref.finalize(self, self._state.stop, threads - 1)

    def context(self) -> Context:
        """A context that no helper is inside of, its counters zero."""
        with self._state.lock:
            free = next((c for c in self._state.contexts if c.inside == 0), None)
            if free is None:
                free = Context(*self._new_context)
                self._state.contexts.append(free)
        free.counters[:] = 0
        free.counters[YIELD_OFFSET // 8 :: PRELUDE_OFFSET // 8] = _SCHED_YIELD
        return free

    def run(self, context: Context) -> None:
        """Run the step on this thread, with as many helpers as come; returns when it is done. One caller at a time."""
        state = self._state
        with state.lock:
            state.current = context
            calls = self.threads - 1 - state.called
            state.called += calls
        for _ in range(calls):
            state.wake.release()
        self._function(context.step.ctypes.data)
        with state.lock:
            state.current = None


class _State:
    """What helpers share with their team; it outlives the team, so a team can be collected."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wake = threading.Semaphore(0)
        self.called = 0  # helpers called that have not yet looked for work
        self.current: Context | None = None
        self.contexts: list[Context] = []
        self.stopped = False

    def stop(self, helpers: int) -> None:
        self.stopped = True
        self.wake.release(helpers) if helpers else None


def _help(state: _State, function: Callable[[int], None]) -> None:
    while True:
        state.wake.acquire()
        if state.stopped:
            return
        with state.lock:
            state.called -= 1
            context = state.current
            if context is None:  # the step ended without me
                continue
            context.inside += 1
        function(context.step.ctypes.data)
        with state.lock:
            context.inside -= 1
