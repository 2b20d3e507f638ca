"""Bugs to plant: name -> (how, what must be seen, the configuration of the run)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
BUGS: dict[str, tuple[Callable[[Patch], None], str, dict[str, Any]]] = {}


def bug(expected: str, **config: Any) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__] = (plant, expected, config)
        return plant

    return register
