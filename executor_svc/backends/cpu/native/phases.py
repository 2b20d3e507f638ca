"""How several threads share a step: phases of independent items, taken by ticket.

A phase ends when its *items* are done, not when all threads have arrived: a thread that the system put aside between
two items delays nobody, and one that comes late finds no tickets left and catches up. Which thread computes an item
never changes its result.
"""

from __future__ import annotations

from numba import njit

from executor_svc.backends.cpu.native.layout import CYCLES_OFFSET, DONE_OFFSET, YIELD_OFFSET
from executor_svc.backends.cpu.native.vector import atomic_add, atomic_load, call, load_int, spin_pause, store_cycles

_SPINS = 4000  # pauses (some 50 us) before the processor is offered to others


@njit(nogil=True, error_model="numpy")
def take(counter, count):  # type: ignore[no-untyped-def]
    """The next item of a phase of ``count`` items, or ``count`` when none is left."""
    return min(atomic_add(counter, 1), count)


@njit(nogil=True, error_model="numpy")
def finish(counter, done, count):  # type: ignore[no-untyped-def]
    """Report ``done`` items of mine, then wait until all ``count`` are."""
    if done > 0:
        atomic_add(counter + DONE_OFFSET, done)
    spins = 0
    while atomic_load(counter + DONE_OFFSET) < count:
        spin_pause()
        spins += 1
        if spins > _SPINS:
            call(load_int(counter + YIELD_OFFSET))
            spins = 0
    store_cycles(counter + CYCLES_OFFSET)  # by each thread; any of them will do for the profile
