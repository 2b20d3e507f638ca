"""Python's cycle collector, kept out of the way of the core's turns.

A collection of the older objects looks at every container that lives: with thousands of requests that is the longest
pause there is, at a moment that nobody chose. The core does not need it: what ends is freed by reference counts alone,
because `Streams` and `ExecutorState` take their cycles apart (tests/core/test_garbage.py), and the entries of the
prefix cache are none of its business (prefix_cache.py). So it is off while the core runs. What other code may leave
behind is collected when nobody waits for the core, and only if much came into being since the last time.
"""

from __future__ import annotations

import gc

WORTH_A_LOOK = 20_000  # containers more than at the last collection
ENOUGH = 1_000_000  # do not wait for a quiet moment any longer


def take_over() -> None:
    """From now on nothing is collected but by `collect_if_worth`; what is there already stays for good."""
    gc.disable()
    gc.collect()
    gc.freeze()


def collect_if_worth(quiet: bool) -> bool:
    """To be called between turns. ``quiet``: nobody waits for the core. Returns whether it collected."""
    if gc.get_count()[0] < (WORTH_A_LOOK if quiet else ENOUGH):
        return False
    gc.collect()
    return True
