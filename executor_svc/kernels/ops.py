"""The kernels behind the operations of the decoder: norms, rotary embedding, paged attention, activation.

The same interface as the CPU's operations (backends/cpu/ops.py), on the launcher's device and in the cache's dtype.
The cache of a layer is two tensors [num_blocks, kv_heads, block_size, head_dim].
"""

from __future__ import annotations

import numpy as np
import torch

from executor_svc.kernels.attention import AttentionShape, PagedAttention
from executor_svc.kernels.elementwise import ElementwiseKernels
from executor_svc.kernels.launch import Launcher
from executor_svc.kernels.plan import AttentionPlan, plan_attention
from executor_svc.kernels.table import MAX_GROUP
from executor_svc.metadata import StepMetadata
from executor_svc.models.config import ModelConfig

BLOCKS_PER_MULTIPROCESSOR = 2  # decode blocks that run at once: what shared memory allows


class KernelOps:
    """One instance per model; it owns the KV cache. Activations are contiguous, of ``dtype``, on the device; rows
    beyond the step's T tokens are padding: attention leaves them zero, and nothing of them reaches the cache."""

    name = "kernels"

    def __init__(self, launcher: Launcher, config: ModelConfig, rope: torch.Tensor, dtype: torch.dtype) -> None:
        """``rope`` is ``rope_table``: float32 [context, head_dim]. ``ValueError`` for a head size, group or dtype that
        the kernels do not have, or for a named difference that they do not implement."""
        for difference in config.differences():
            raise ValueError(f"{difference} = {getattr(config, difference)!r} is not implemented by the kernels")
        self._launcher, self._config, self._dtype = launcher, config, dtype
        self._rope = rope.to(launcher.device)
        self._elementwise = ElementwiseKernels(launcher, dtype)
        self._target_blocks = BLOCKS_PER_MULTIPROCESSOR * launcher.num_multiprocessors
        self._shape = self._shape_for(block_size=16)  # refuses what the kernels do not have, before weights are loaded
        self._attention = PagedAttention(launcher, self._shape)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._workspace = (self._empty(0), self._empty(0))

    def _shape_for(self, block_size: int) -> AttentionShape:
        config = self._config
        scale = config.head_dim**-0.5
        return AttentionShape(self._dtype, config.num_heads, config.num_kv_heads, config.head_dim, block_size, scale)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._launcher.device)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        config = self._config
        self._shape = self._shape_for(block_size)
        self._attention = PagedAttention(self._launcher, self._shape)
        size = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        device = self._launcher.device
        self._keys = [torch.empty(size, dtype=self._dtype, device=device) for _ in range(config.num_layers)]
        self._values = [torch.empty(size, dtype=self._dtype, device=device) for _ in range(config.num_layers)]

    def kv_tensors(self) -> list[torch.Tensor]:
        """Every cache tensor, for tests that poison them."""
        return [*self._keys, *self._values]

    def begin_step(self, metadata: StepMetadata) -> None:
        """Plan the step's attention and copy to the device what every layer shares."""
        num_blocks, _, block_size, _ = self._keys[0].shape
        last_block = metadata.block_tables.max(initial=-1)
        last_slot = metadata.kv_slots.max(initial=-1)
        if last_block >= num_blocks or last_slot >= num_blocks * block_size:
            raise ValueError(f"the step names blocks that a cache of {num_blocks} does not have")
        if metadata.positions.max(initial=0) >= len(self._rope):
            raise ValueError(f"the step goes beyond the context of {len(self._rope)} tokens")
        shape = self._shape
        self._plan: AttentionPlan = plan_attention(
            metadata.query_starts,
            metadata.query_lens,
            metadata.seq_lens,
            group=shape.group,
            kv_heads=shape.kv_heads,
            window=shape.window,
            tile_rows=shape.tile_rows,
            target_blocks=self._target_blocks,
        )
        self._device_plan = (
            self._upload(self._plan.decode), self._upload(self._plan.prefill), self._upload(self._plan.merges),
        )  # fmt: skip
        self._positions = self._upload(metadata.positions)
        self._kv_slots = self._upload(metadata.kv_slots)
        self._block_tables = self._upload(metadata.block_tables)
        rows = self._plan.num_slots * shape.kv_heads * MAX_GROUP
        if self._workspace[1].numel() < rows:
            self._workspace = (self._empty(rows * shape.head_dim), self._empty(rows))

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._launcher.device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._elementwise.add_rms_norm(out, x, None, weight, self._config.rms_norm_eps)
        return out

    def add_rms_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(residual)
        self._elementwise.add_rms_norm(out, residual, delta, weight, self._config.rms_norm_eps)
        return out

    def rotate_and_cache(self, layer: int, qkv: torch.Tensor) -> None:
        tokens = len(self._positions)
        self._elementwise.rotate_and_cache(
            qkv[:tokens], self._keys[layer], self._values[layer], self._rope, self._positions, self._kv_slots
        )

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(qkv), self._config.q_size, dtype=qkv.dtype, device=qkv.device)
        self._attention(
            out,
            qkv,
            self._keys[layer],
            self._values[layer],
            self._block_tables,
            self._plan,
            self._device_plan,
            self._workspace,
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
        self._elementwise.silu_mul(out, gate_up)
        return out
