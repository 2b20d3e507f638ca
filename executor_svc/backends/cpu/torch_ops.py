"""The CPU operations in plain torch: the oracle for the compiled kernels, and the fallback where numba is missing.

Attention works in items of ``QUERY_TILE`` consecutive new tokens of one row, ``ITEMS`` items at a time, over KV tiles
of ``KV_TILE`` tokens from position 0. All three are constants, so every matrix product has one fixed shape: a row's
bits cannot depend on the batch. Missing items, queries and keys are masked.

A step is thousands of small operations. Each runs in the calling thread alone: a team of threads meets at the end of
every one, and where other processes want the cores too, every meeting waits for a time slice (135M parameters, 2
threads on 2 cores at a load of 14: 14 to 32 s a decode step so, 4 s with the linears alone in both; 0.2 s in one).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from executor_svc.backends.cpu.exact import exact_exp, exact_sum, exact_tanh
from executor_svc.metadata import StepMetadata
from executor_svc.models.config import ModelConfig

QUERY_TILE = 8  # tokens
KV_TILE = 64  # tokens
ITEMS = 8
_NEVER = 1 << 40  # beyond any position
_GELU = math.sqrt(2.0 / math.pi)

P = ParamSpec("P")
T = TypeVar("T")


def in_one_thread(method: Callable[Concatenate[TorchOps, P], T]) -> Callable[Concatenate[TorchOps, P], T]:
    """torch's own threads stay out of it; their number is restored after."""

    @wraps(method)
    def run(self: TorchOps, /, *args: P.args, **kwargs: P.kwargs) -> T:
        threads = torch.get_num_threads()
        if threads == 1:
            return method(self, *args, **kwargs)
        torch.set_num_threads(1)
        try:
            return method(self, *args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return run


class TorchOps:
    """See ``CpuOps``. The cache of a layer is [num_blocks * block_size, KV heads, head_dim] for K and for V."""

    name = "torch"

    def __init__(self, config: ModelConfig, rope: torch.Tensor, local_rope: torch.Tensor | None = None) -> None:
        """``rope`` is ``rope_table``: float32 [context, rotary_dim]; ``local_rope`` that of layers with a window, if it
        differs."""
        self._config = config
        self._rope = rope
        self._local_rope = local_rope
        self._block_size = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        config = self._config
        shape = (num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self._block_size = block_size
        self._keys = [torch.empty(shape) for _ in range(config.num_layers)]
        self._values = [torch.empty(shape) for _ in range(config.num_layers)]

    def kv_tensors(self) -> list[torch.Tensor]:
        """Every cache tensor, for tests that poison them."""
        return [*self._keys, *self._values]

    @in_one_thread
    def begin_step(self, metadata: StepMetadata) -> None:
        positions = torch.from_numpy(metadata.positions)
        self._kv_slots = torch.from_numpy(metadata.kv_slots)
        self._rotary = self._rope[positions][:, None]
        self._local_rotary = self._rotary if self._local_rope is None else self._local_rope[positions][:, None]
        self._chunks = self._make_chunks(metadata)

    def _make_chunks(self, metadata: StepMetadata) -> list[tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]]:
        """Per chunk of items: query indices [ITEMS, QUERY_TILE] (-1 padded) with their positions, and for each KV
        tile the cache slots [ITEMS, KV_TILE] (0 where a row has none; the causal mask hides those)."""
        query_lens = metadata.query_lens.astype(np.int64)
        tiles = -(-query_lens // QUERY_TILE)
        rows = np.repeat(np.arange(metadata.num_rows), tiles)
        first = (np.arange(len(rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * QUERY_TILE
        offsets = first[:, None] + np.arange(QUERY_TILE)
        valid = offsets < query_lens[rows][:, None]
        queries = np.where(valid, metadata.query_starts[rows][:, None] + offsets, -1)
        positions = np.where(valid, metadata.seq_lens[rows][:, None] + offsets, -1)
        order = np.argsort(positions.max(axis=1), kind="stable")  # items of one chunk: similar lengths
        chunks = []
        for start in range(0, len(order), ITEMS):
            chosen = order[start : start + ITEMS]
            pad = ITEMS - len(chosen)
            chunk_queries = np.pad(queries[chosen], ((0, pad), (0, 0)), constant_values=-1)
            chunk_positions = np.pad(positions[chosen], ((0, pad), (0, 0)), constant_values=-1)
            tables = np.pad(metadata.block_tables[rows[chosen]], ((0, pad), (0, 0)), constant_values=-1)
            slots = []
            for tile in range(int(chunk_positions.max()) // KV_TILE + 1):
                keys = tile * KV_TILE + np.arange(KV_TILE)
                column = keys // self._block_size
                block = np.where(column < tables.shape[1], tables[:, np.minimum(column, tables.shape[1] - 1)], -1)
                slot = block.astype(np.int64) * self._block_size + keys % self._block_size
                slots.append(torch.from_numpy(np.where(block >= 0, slot, 0)))
            chunks.append((torch.from_numpy(chunk_queries), torch.from_numpy(chunk_positions), slots))
        return chunks

    @in_one_thread
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        mean_square = exact_sum(x * x) / x.shape[-1]
        return weight * (x * (1.0 / torch.sqrt(mean_square + self._config.rms_norm_eps)))

    @in_one_thread
    def norm_heads(self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> None:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries = heads[:, : config.num_heads]
        keys = heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
        for part, weight in ((queries, q_weight), (keys, k_weight)):
            part.copy_(self.rms_norm(part, weight))

    @in_one_thread
    def add_rms_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        residual += delta
        return self.rms_norm(residual, weight)

    @in_one_thread
    def rotate_and_cache(self, layer: int, qkv: torch.Tensor) -> None:
        config = self._config
        tokens = len(self._kv_slots)
        heads = qkv[:tokens].view(tokens, -1, config.head_dim)
        cos, sin = (self._local_rotary if config.window(layer) else self._rotary).chunk(2, dim=-1)
        rotated = heads[:, : config.num_heads + config.num_kv_heads, : config.rotary_dim]
        low, high = rotated.chunk(2, dim=-1)
        rotated.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))
        self._keys[layer][self._kv_slots] = heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
        self._values[layer][self._kv_slots] = heads[:, config.num_heads + config.num_kv_heads :]

    @in_one_thread
    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        config = self._config
        queries = qkv[:, : config.q_size].view(-1, config.num_kv_heads, config.group_size, config.head_dim)
        out = torch.zeros(len(qkv), config.q_size)
        for indices, positions, slots in self._chunks:
            valid = indices >= 0
            # [items, KV heads, group x queries, head_dim]
            q = torch.where(valid[..., None, None, None], queries[indices.clamp(min=0)], 0.0)
            q = q.permute(0, 2, 3, 1, 4).reshape(ITEMS * config.num_kv_heads, -1, config.head_dim)
            result = self._attend_chunk(layer, q, positions, slots)
            result = result.view(ITEMS, config.num_kv_heads, config.group_size, QUERY_TILE, config.head_dim)
            result = result.permute(0, 3, 1, 2, 4).reshape(ITEMS, QUERY_TILE, config.q_size)
            out[indices[valid]] = result[valid]
        return out

    def _attend_chunk(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, slots: list[torch.Tensor]
    ) -> torch.Tensor:
        """Online softmax over the KV tiles. q [ITEMS * KV heads, group * QUERY_TILE, head_dim] -> the same shape."""
        config = self._config
        batch, rows = q.shape[:2]
        window = config.window(layer)
        oldest = positions - window if window else torch.full_like(positions, -1)  # the newest token not seen
        largest = torch.full((batch, rows, 1), -torch.inf)
        total = torch.zeros(batch, rows, 1)
        out = torch.zeros(q.shape)
        first = torch.where(positions >= 0, oldest, _NEVER).amin(dim=1) + 1  # of the tokens that an item sees
        last = positions.amax(dim=1)
        # Tiles that no item sees are passed over, which changes no bit: one adds zeros to every sum.
        for tile in range(max(int(first.min()), 0) // KV_TILE, len(slots)):
            tile_slots = slots[tile]
            at = tile * KV_TILE + torch.arange(KV_TILE)
            visible = (at <= positions[..., None]) & (at > oldest[..., None])  # [ITEMS, QUERY_TILE, KV_TILE]
            mask = visible[:, None, None].expand(-1, config.num_kv_heads, config.group_size, -1, -1)
            mask = mask.reshape(batch, rows, KV_TILE)
            keys = self._keys[layer][tile_slots].transpose(1, 2).reshape(batch, KV_TILE, config.head_dim)
            values = self._values[layer][tile_slots]
            # Unwritten cache may hold NaN, and 0 x NaN is NaN: values are masked as well as scores.
            seen = (at >= first[:, None]) & (at <= last[:, None])
            values = torch.where(seen[..., None, None], values, 0.0)
            values = values.transpose(1, 2).reshape(batch, KV_TILE, config.head_dim)
            scores = torch.bmm(q, keys.transpose(1, 2)) * config.score_scale
            if config.attention_softcap:
                scores = self.softcap(scores, config.attention_softcap)
            scores = torch.where(mask, scores, -torch.inf)
            new_largest = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
            base = torch.where(new_largest == -torch.inf, 0.0, new_largest)  # a row that sees nothing yet
            weights = torch.where(mask, exact_exp(scores - base), 0.0)
            correction = torch.where(largest == -torch.inf, 0.0, exact_exp(largest - base))
            total = total * correction + exact_sum(weights)
            out = out * correction + torch.bmm(weights, values)
            largest = new_largest
        return out / torch.where(total == 0.0, 1.0, total)

    @in_one_thread
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate / (1.0 + exact_exp(-gate)) * up

    @in_one_thread
    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        # (1 + tanh u) / 2 = 1 / (1 + e^-2u)
        return gate / (1.0 + exact_exp(-2.0 * _GELU * (gate + 0.044715 * (gate * gate * gate)))) * up

    @in_one_thread
    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return exact_tanh(x / cap) * cap
