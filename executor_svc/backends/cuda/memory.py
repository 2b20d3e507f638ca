"""How many KV blocks a device has room for: what is free after the weights, less what a step needs, less a reserve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from executor_svc.backends.cuda.device import Memory
from executor_svc.kv_memory import KvMemoryError
from executor_svc.models.base import ModelFacts

RESERVE = 512 << 20  # bytes: kernel images, workspaces of the matrix products, fragments
DEFAULT_FRACTION = 0.9  # of the device's memory, for everything together


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one device, with the weights loaded and a step of the largest batch run once."""

    memory: Memory  # after that step; what it held is free again
    step: int  # what it held at most
    graphs: int  # what captured graphs will hold: a step of the largest graph has its own activations

    @property
    def used(self) -> int:
        """By the weights, this process's context, and whoever else is on the device."""
        return self.memory.total - self.memory.free


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Torch's error of a full device becomes MemoryError with one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"the GPU has no room for {what}: {str(error).splitlines()[0]}") from error


def kv_blocks(
    facts: ModelFacts,
    block_size: int,
    max_slots: int,
    measured: Measured,
    fraction: float,
    kv_memory: int | None,
    kv_blocks: int | None,
) -> int:
    """Blocks of ``block_size`` tokens to allocate: as told (``kv_memory`` in bytes), or what ``fraction`` of the device
    leaves. Raises KvMemoryError with the numbers where they do not fit."""
    block = facts.kv_bytes_per_token * block_size
    spoken_for = measured.step + measured.graphs + RESERVE
    share = int(measured.memory.total * fraction) - measured.used
    left = min(measured.memory.free, share) - spoken_for
    numbers = (
        f"the GPU has {_gib(measured.memory.total)}, {_gib(measured.used)} in use with the weights loaded; a step "
        f"takes up to {_gib(measured.step)}, graphs {_gib(measured.graphs)}, the reserve {_gib(RESERVE)}"
    )
    if kv_memory is not None or kv_blocks is not None:
        wanted = kv_blocks if kv_blocks is not None else (kv_memory or 0) // block
        flag = f"--kv-blocks {kv_blocks}" if kv_blocks is not None else f"--kv-memory {kv_memory}"
        if wanted < 1:
            raise KvMemoryError(f"{flag} bytes is less than one block of {block_size} tokens ({block} bytes)")
        room = measured.memory.free - spoken_for  # the fraction is no limit for what was asked for by number
        if wanted * block > room:
            raise KvMemoryError(f"{flag}: {_gib(wanted * block)} of KV cache, but {_gib(room)} are left: {numbers}")
        return min(wanted, 2**26)
    whole_context = -(-facts.context_length // block_size)
    blocks = min(left // block, max_slots * whole_context, 2**26)
    if blocks < 1:
        raise KvMemoryError(
            f"no room for a KV cache: {numbers}; {_gib(left)} are left of --gpu-memory-fraction {fraction:g}. Lower "
            "--max-batch-tokens or --max-slots, raise --gpu-memory-fraction, or serve a smaller model"
        )
    return blocks


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
