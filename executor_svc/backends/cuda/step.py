"""One step's batch as the kernels read it: made on the host, copied to the device at once.

A decode step may be padded to ``size`` rows, so that all shapes, and with them all addresses, are those of a captured
graph. Padded rows are defined: id 0 at position 0, cache slot -1 (nothing is written), no item of attention (its output
is zeros). Their logits are computed and never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.backends.cuda.staging import Array, Staging
from executor_svc.kernels.attention import AttentionShape, DevicePlan
from executor_svc.kernels.plan import ITEM_FIELDS, AttentionPlan, most_items, plan_attention
from executor_svc.metadata import StepMetadata


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """T tokens, S wanted rows of logits, all on the device."""

    input_ids: torch.Tensor  # int64 [T], -1 where the id is in ``last_tokens`` at ``token_slots``
    positions: torch.Tensor  # int64 [T]
    kv_slots: torch.Tensor  # int64 [T], -1: padding
    wanted: torch.Tensor  # int64 [S]
    token_slots: torch.Tensor  # int32 [T]
    plans: tuple[DevicePlan, ...]  # one for each of the step's windows, in the order given
    block_tables: torch.Tensor  # int32 [entries, 1]: an item's row says where its table begins
    padded: bool  # a decode step of a graph: tokens with cache slot -1 are nobody's


class StepLayout:
    """Makes steps for attention of given shapes: one for each window that the model's layers have."""

    def __init__(self, shapes: Sequence[AttentionShape], target_blocks: int) -> None:
        self._shapes = shapes
        self._target_blocks = target_blocks

    def upload(self, metadata: StepMetadata, staging: Staging, size: int | None = None) -> DeviceStep:
        """``size``: of a padded decode step, at least its rows."""
        plans = [self._plan(metadata, shape) for shape in self._shapes]
        arrays = _flat(metadata) if size is None else _padded(metadata, size)
        width = metadata.block_tables.shape[1]
        for plan, shape in zip(plans, self._shapes, strict=True):
            decode, prefill = plan.decode, plan.prefill
            for items in (decode, prefill):
                items[:, 0] *= width  # where the row's table begins
            merges = plan.merges
            if size is not None:
                decode = _filled(decode, most_items(size, self._target_blocks, shape.kv_heads))
                merges = _filled(merges, size)
            arrays += [decode, prefill, merges]
        tables = metadata.block_tables.reshape(-1, 1)
        # Last: all other addresses are the same whatever its size. Never empty: a pointer has to point somewhere.
        arrays.append(tables if len(tables) else np.full((1, 1), -1, np.int32))
        found = staging.upload(arrays, open_end=size is not None)
        planned = found[5:-1]
        by_window = tuple(DevicePlan(*planned[at : at + 3]) for at in range(0, len(planned), 3))
        input_ids, positions, kv_slots, wanted, token_slots = found[:5]
        return DeviceStep(input_ids, positions, kv_slots, wanted, token_slots, by_window, found[-1], size is not None)

    def _plan(self, metadata: StepMetadata, shape: AttentionShape) -> AttentionPlan:
        return plan_attention(
            metadata.query_starts,
            metadata.query_lens,
            metadata.seq_lens,
            group=shape.group,
            kv_heads=shape.kv_heads,
            window=shape.window,
            tile_rows=shape.tile_rows,
            target_blocks=self._target_blocks,
        )

    def most_bytes(self, max_rows: int, max_tokens: int, max_blocks: int) -> int:
        """What a step of ``max_rows`` rows, ``max_tokens`` tokens and tables of ``max_blocks`` takes at most."""
        items = sum(
            4 * ITEM_FIELDS * (max_tokens + most_items(max_rows, self._target_blocks, shape.kv_heads)) + 16 * max_rows
            for shape in self._shapes
        )
        return 36 * max_tokens + items + 4 * max_rows * max_blocks + 4096


def _flat(metadata: StepMetadata) -> list[Array]:
    token_slots = metadata.slots
    if metadata.num_tokens != metadata.num_rows:
        token_slots = np.repeat(token_slots, metadata.query_lens)
    return [metadata.input_ids, metadata.positions, metadata.kv_slots, metadata.logit_indices, token_slots]


def _padded(metadata: StepMetadata, size: int) -> list[Array]:
    """Of a step of decode rows alone."""
    rows = metadata.num_rows

    def pad(values: Array, fill: int) -> Array:
        out = np.full(size, fill, values.dtype)
        out[:rows] = values
        return out

    return [
        pad(metadata.input_ids, 0),
        pad(metadata.positions, 0),
        pad(metadata.kv_slots, -1),
        np.arange(size),
        pad(metadata.slots, 0),
    ]


def _filled(values: Array, length: int) -> Array:
    """With rows of -1 up to ``length``."""
    if len(values) > length:
        raise ValueError(f"{len(values)} items of attention; a graph has room for {length}")
    out = np.full((length, values.shape[1]), -1, np.int32)
    out[: len(values)] = values
    return out
