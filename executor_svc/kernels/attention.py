"""Launches of the attention kernels: grids, specialisations and arguments, the same on every back end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.kernels.launch import Launcher
from executor_svc.kernels.table import HEAD_DIMS, MAX_GROUP, decode_smem, f32_smem, prefill_rows, prefill_smem

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What does not change from step to step. ``scale`` multiplies q.k; ``softcap`` and ``window`` are 0 for none."""

    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.dtype not in TYPE_NAMES:
            raise ValueError(f"attention kernels have no dtype {self.dtype}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"attention kernels have no head size {self.head_dim}; they have {HEAD_DIMS}")
        if self.q_heads % self.kv_heads or self.q_heads // self.kv_heads > MAX_GROUP:
            raise ValueError(f"{self.q_heads} query heads over {self.kv_heads} KV heads; groups of 1 to {MAX_GROUP}")
        if self.block_size < 16:
            raise ValueError(f"block size {self.block_size}; 16 or more is supported")

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def tile_rows(self) -> int:
        """Packed rows of a prefill block; 0 where one kernel does everything."""
        return 0 if self.dtype == torch.float32 else prefill_rows(self.head_dim)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step's plan (``plan.AttentionPlan``) on the device; items and merges of -1 are padding and do nothing."""

    decode: torch.Tensor  # int32 [n, 8]
    prefill: torch.Tensor  # int32 [n, 8]
    merges: torch.Tensor  # int32 [n, 4]


class PagedAttention:
    """Attention of a step's queries over the paged cache [num_blocks, kv_heads, block_size, head_dim]."""

    def __init__(self, launcher: Launcher, shape: AttentionShape) -> None:
        name, head_dim = TYPE_NAMES[shape.dtype], shape.head_dim
        self._shape = shape
        self._smem = f32_smem(head_dim, 4) if name == "f32" else decode_smem(head_dim, 2)
        self._decode = launcher.kernel(
            f"paged_attention_f32<{head_dim}>" if name == "f32" else f"paged_decode<{name}, {head_dim}>"
        )
        self._prefill = None if name == "f32" else launcher.kernel(f"paged_prefill<{name}, {head_dim}>")
        self._merge = launcher.kernel(f"paged_merge<{name}>")

    def __call__(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        plan: DevicePlan,
        workspace: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Fills ``out`` [T, q_heads * head_dim] for every query that the plan names. The grid depends on the plan's
        lengths alone, so a graph may hold the launch and the plan's content may change under it.

        ``q`` [T, >= q_heads * head_dim], the queries first (rotated qkv serves as it is). ``block_tables`` int32
        [rows, stride]: an item's ``row`` times the stride is where its table begins. ``workspace``: float32, of at
        least [slots, kv_heads, 16, head_dim] and [slots, kv_heads, 16] elements for the slots of the plan.
        """
        shape = self._shape
        part_out, part_lse = workspace
        common = (
            np.int32(block_tables.shape[1]),
            np.int32(shape.block_size),
            np.int32(shape.group),
            np.int32(q.shape[1]),
            np.int32(shape.window),
            np.float32(shape.scale),
            np.float32(shape.softcap),
        )
        caches = (q, key_cache, value_cache, block_tables)
        if len(plan.decode):
            grid = (len(plan.decode), shape.kv_heads)
            self._decode(grid, (128,), (out, part_out, part_lse, *caches, plan.decode, *common), self._smem)
        if len(plan.prefill):
            assert self._prefill is not None  # a float32 plan has decode items only
            grid = (len(plan.prefill), shape.kv_heads)
            smem = prefill_smem(shape.head_dim, 2)
            self._prefill(grid, (128,), (out, *caches, plan.prefill, *common), smem)
        if len(plan.merges):
            merging = (len(plan.merges), shape.kv_heads, -(-shape.group // 4))  # a block: four warps, a row each
            sizes = (np.int32(shape.group), np.int32(shape.head_dim))
            self._merge(merging, (128,), (out, part_out, part_lse, plan.merges, *sizes))
