"""How many KV blocks this executor has: as told, or a share of the memory that is free now."""

from __future__ import annotations

import os
import re
from pathlib import Path

from executor_svc.models.base import ModelFacts

FREE_SHARE = 0.4  # of the free memory, taken by default: the rest is activations, logits and other processes
MAX_BLOCKS = 2**20  # by default: more than this needs to be asked for

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}B": size for unit, size in _UNITS.items() if unit and unit != "B"}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class KvMemoryError(ValueError):
    """The KV cache cannot be sized; the message names the numbers and the flag."""


def parse_size(text: str) -> int:
    """``1GiB``, ``512MB``, ``1000000`` -> bytes. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size: write 1GiB, 512MiB, 2GB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its control group where that holds less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass  # not Linux, or no control group: what sysconf said stands
    return max(free, 0)


def num_blocks(
    facts: ModelFacts, block_size: int, max_slots: int, kv_memory: int | None, kv_blocks: int | None, free: int
) -> int:
    """Blocks of ``block_size`` tokens to allocate. ``kv_memory`` and ``free`` in bytes. Raises KvMemoryError."""
    if kv_blocks is not None:
        return kv_blocks
    block_bytes = facts.kv_bytes_per_token * block_size
    whole_context = -(-facts.context_length // block_size)
    if kv_memory is not None:
        blocks = kv_memory // block_bytes
        if blocks < 1:
            raise KvMemoryError(
                f"--kv-memory {kv_memory} bytes is less than one block of {block_size} tokens ({block_bytes} bytes)"
            )
        return min(blocks, 2**26)
    blocks = min(int(free * FREE_SHARE) // block_bytes, max_slots * whole_context, MAX_BLOCKS)
    if blocks < 1:
        raise KvMemoryError(
            f"{free} bytes of memory are free: {FREE_SHARE:.0%} of them hold no block of {block_size} tokens "
            f"({block_bytes} bytes); free some, or choose with --kv-memory or --kv-blocks"
        )
    return blocks
