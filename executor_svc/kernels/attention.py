"""Launches of the attention kernels: grids, specialisations and arguments, the same on every back end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.kernels.launch import Launcher
from executor_svc.kernels.plan import AttentionPlan
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
        plan: AttentionPlan,
        device_plan: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        workspace: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Fills ``out`` [T, q_heads * head_dim] for every query that the plan names.

        ``q`` [T, >= q_heads * head_dim], the queries first (rotated qkv serves as it is). ``block_tables`` int32
        [R, width]. ``device_plan``: the plan's decode items, prefill items and merges on the device. ``workspace``:
        float32, of at least [num_slots, kv_heads, 16, head_dim] and [num_slots, kv_heads, 16] elements.
        """
        shape = self._shape
        part_out, part_lse = workspace
        if part_lse.numel() < plan.num_slots * shape.kv_heads * MAX_GROUP:
            raise ValueError(f"the workspace has no room for {plan.num_slots} partial results")
        decode_items, prefill_items, merges = device_plan
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
            self._decode(grid, (128,), (out, part_out, part_lse, *caches, decode_items, *common), self._smem)
        if len(plan.prefill):
            assert self._prefill is not None  # a float32 plan has decode items only
            grid = (len(plan.prefill), shape.kv_heads)
            smem = prefill_smem(shape.head_dim, 2)
            self._prefill(grid, (128,), (out, *caches, prefill_items, *common), smem)
        if len(plan.merges):
            grid = (len(plan.merges), shape.kv_heads)
            sizes = (np.int32(shape.group), np.int32(shape.head_dim))
            self._merge(grid, (128,), (out, part_out, part_lse, merges, *sizes))
