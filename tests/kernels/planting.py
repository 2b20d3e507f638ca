"""Bugs planted in a kernel's source, and that the interpreter's checks or the comparison with float64 find them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor_svc.kernels.build import SOURCE_DIR
from tests.kernels.ptx.errors import PtxError

IN_FLIGHT = r"before it is written|data race in shared"
WRONG = "wrong"  # no check fires: the comparison with float64 fails


@dataclass(frozen=True)
class Bug:
    what: str
    file: str
    text: str
    replacement: str
    found: str  # a pattern of the interpreter's message, or WRONG
    dtype: torch.dtype = torch.bfloat16


def plant(file: str, text: str, replacement: str) -> dict[str, str]:
    """``overrides`` of the launcher."""
    source = (SOURCE_DIR / file).read_text()
    assert text in source, f"{file} has changed: {text!r} is not there"
    return {file: source.replace(text, replacement)}


def assert_found(bug: Bug, error_of: Callable[[dict[str, str]], float], tolerance: float) -> None:
    """``error_of(overrides)``: the error of a run with the bug in."""
    message, error = "", 0.0
    try:
        error = error_of(plant(bug.file, bug.text, bug.replacement))
    except PtxError as caught:
        message = str(caught)
    if message:
        assert re.search(bug.found, message), message
        assert re.search(r"\.cuh?:\d+", message), message  # with its line
    else:
        assert WRONG in bug.found
        assert error > 2 * tolerance
