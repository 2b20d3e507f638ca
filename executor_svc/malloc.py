"""Keep large freed buffers in the process: activations of one step are the next step's, and asking the kernel for
zeroed pages each time costs more than the arithmetic of a small step. glibc only; elsewhere nothing is done."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_SIZES = (1 << 30, 32 << 20)  # bytes; older glibc refuses an mmap threshold above 32 MiB


def keep_freed_memory() -> bool:
    """Raise malloc's mmap and trim thresholds; True when both were taken."""
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    raised = any(mallopt(_M_MMAP_THRESHOLD, size) for size in _SIZES)
    return bool(mallopt(_M_TRIM_THRESHOLD, _SIZES[0])) and raised
