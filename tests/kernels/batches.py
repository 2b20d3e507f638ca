"""Random paged batches: caches full of NaN but for the tokens that exist, shuffled blocks, poisoned outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.kernels.attention import AttentionShape, DevicePlan, PagedAttention
from executor_svc.kernels.launch import Launcher
from executor_svc.kernels.plan import AttentionPlan, plan_attention
from tests.kernels import references

TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 3e-6}  # of what max_error returns


@dataclass
class Batch:
    shape: AttentionShape
    past: np.ndarray  # int32 [R]
    lens: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R + 1]
    qkv: torch.Tensor
    keys: list[torch.Tensor]  # [tokens, kv_heads, D] of each row
    values: list[torch.Tensor]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor

    def plan(self, target_blocks: int) -> AttentionPlan:
        return plan_attention(
            self.starts, self.lens, self.past, group=self.shape.group, kv_heads=self.shape.kv_heads,
            window=self.shape.window, tile_rows=self.shape.tile_rows, target_blocks=target_blocks,
        )  # fmt: skip

    def expected(self) -> torch.Tensor:
        """float64 [T, q_heads, D]"""
        shape = self.shape
        out = torch.zeros(len(self.qkv), shape.q_heads, shape.head_dim, dtype=torch.float64)
        q = self.qkv[:, : shape.q_heads * shape.head_dim].view(-1, shape.q_heads, shape.head_dim)
        for row, (past, n) in enumerate(zip(self.past.tolist(), self.lens.tolist(), strict=True)):
            at = int(self.starts[row])
            out[at : at + n] = references.attention(
                q[at : at + n], self.keys[row], self.values[row], past, shape.scale, shape.window, shape.softcap
            )
        return out


def make_batch(shape: AttentionShape, past: list[int], lens: list[int], seed: int = 0, first_block: int = 0) -> Batch:
    """``first_block``: the batch's block ids begin there (the cache before it is never touched)."""
    generator = torch.Generator().manual_seed(seed)
    past_lens, query_lens = np.array(past, np.int32), np.array(lens, np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    total = past_lens + query_lens
    blocks = -(-total // shape.block_size)
    used = int(blocks.sum()) + 2  # the first block and another one are nobody's
    order = first_block + 1 + np.random.default_rng(seed).permutation(used - 1)
    tables = np.full((len(lens), max(int(blocks.max(initial=0)), 1) + 1), -1, np.int32)
    at = 0
    for row, count in enumerate(blocks.tolist()):
        tables[row, :count] = order[at : at + count]
        at += count
    size = (first_block + used, shape.kv_heads, shape.block_size, shape.head_dim)
    key_cache, value_cache = torch.empty(size, dtype=shape.dtype), torch.empty(size, dtype=shape.dtype)
    key_cache[first_block:], value_cache[first_block:] = torch.nan, torch.nan
    keys, values = [], []
    for row, tokens in enumerate(total.tolist()):
        k, v = (torch.randn(tokens, shape.kv_heads, shape.head_dim, generator=generator).to(shape.dtype) for _ in "kv")
        position = torch.arange(tokens)
        block = torch.from_numpy(tables[row].astype(np.int64))[position // shape.block_size]
        key_cache[block, :, position % shape.block_size] = k
        value_cache[block, :, position % shape.block_size] = v
        keys.append(k)
        values.append(v)
    width = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn(int(starts[-1]), width, generator=generator).to(shape.dtype)
    return Batch(
        shape, past_lens, query_lens, starts, qkv, keys, values, key_cache, value_cache, torch.from_numpy(tables)
    )


def attend(launcher: Launcher, batch: Batch, target_blocks: int = 24) -> torch.Tensor:
    """Run the kernels. -> [T, q_heads, D], NaN wherever nothing was written."""
    shape, plan = batch.shape, batch.plan(target_blocks)
    out = torch.full((len(batch.qkv), shape.q_heads * shape.head_dim), torch.nan, dtype=shape.dtype)
    slots = max(plan.num_slots, 1) * shape.kv_heads * 16
    workspace = (torch.full((slots * shape.head_dim,), torch.nan), torch.full((slots,), torch.nan))
    on_device = DevicePlan(*(torch.from_numpy(part) for part in (plan.decode, plan.prefill, plan.merges)))
    caches = (batch.key_cache, batch.value_cache, batch.block_tables)
    PagedAttention(launcher, shape)(out, batch.qkv, *caches, on_device, workspace)
    return out.view(-1, shape.q_heads, shape.head_dim)


def max_error(batch: Batch, out: torch.Tensor) -> float:
    """Of each token and head: the largest error over the largest expected value. NaN counts as infinite."""
    expected = batch.expected()
    error = (out.double() - expected).abs().nan_to_num(nan=float("inf")).amax(dim=-1)
    return float((error / expected.abs().amax(dim=-1).clamp(min=1e-3)).max())
