"""Launches of the kernels between the matrix products: norms, rotary embedding with the KV write, activation, ids."""

from __future__ import annotations

import numpy as np
import torch

from executor_svc.kernels.attention import TYPE_NAMES
from executor_svc.kernels.launch import Launcher

MAX_ROTARY_HEAD = 256


class ElementwiseKernels:
    """All tensors of one step are contiguous, of ``dtype`` unless said otherwise, and on the launcher's device."""

    def __init__(self, launcher: Launcher, dtype: torch.dtype) -> None:
        name = TYPE_NAMES[dtype]
        self._vector = 16 // dtype.itemsize  # elements
        self._norm = launcher.kernel(f"add_rms_norm<{name}>")
        self._silu = launcher.kernel(f"silu_mul<{name}>")
        self._rope = launcher.kernel(f"rope_kv_write<{name}>")
        self._gather = launcher.kernel("gather_ids")

    def add_rms_norm(
        self,
        out: torch.Tensor,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float = 0.0,
    ) -> None:
        """``residual += delta`` in place (``None``: as it is), then ``out = norm(residual) * (weight + offset)``.
        [T, H], [T, H], [T, H], [H]; H a multiple of 16 bytes."""
        tokens, hidden = residual.shape
        self.check_width("hidden size", hidden)
        if tokens:
            args = (out, residual, delta, weight, np.float32(eps), np.float32(weight_offset), np.int32(hidden))
            self._norm((tokens,), (256,), args)

    def silu_mul(self, out: torch.Tensor, gate_up: torch.Tensor) -> None:
        """silu(gate) * up. [T, I], [T, 2 I] (gate first); I a multiple of 16 bytes."""
        tokens, width = out.shape
        self.check_width("intermediate size", width)
        if tokens:
            self._silu((tokens, -(-width // (256 * self._vector))), (256,), (out, gate_up, np.int32(width)))

    def rotate_and_cache(
        self,
        qkv: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rope: torch.Tensor,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        weight_offset: float = 0.0,
    ) -> None:
        """Norms (if given) and rotates q inside ``qkv`` [T, (q_heads + 2 kv_heads) * D]; writes k, normed and rotated,
        and v to the caches [num_blocks, kv_heads, block_size, D].

        ``rope`` float32 [positions, rotary_dim]: cos, then sin. ``positions`` and ``kv_slots`` int64 [T]; a token with
        a negative slot is padding and is left alone.
        """
        _, kv_heads, block_size, head_dim = key_cache.shape
        rotary_dim = rope.shape[1]
        if head_dim > MAX_ROTARY_HEAD or rotary_dim > head_dim or rotary_dim % 2 or (head_dim - rotary_dim) % 2:
            raise ValueError(f"rotary size {rotary_dim} of head size {head_dim}")
        if (q_norm is None) != (k_norm is None):
            raise ValueError("q and k are normed together or not at all")
        heads = qkv.shape[1] // head_dim
        if len(qkv):
            sizes = tuple(np.int32(n) for n in (heads - 2 * kv_heads, kv_heads, head_dim, rotary_dim, block_size))
            args = (qkv, key_cache, value_cache, rope, positions, kv_slots, q_norm, k_norm, *sizes)
            self._rope((len(qkv), -(-heads // 4)), (128,), (*args, np.float32(eps), np.float32(weight_offset)))

    def gather_ids(self, input_ids: torch.Tensor, last_tokens: torch.Tensor, token_slots: torch.Tensor) -> None:
        """Where ``input_ids`` int64 [T] is negative, it becomes ``last_tokens`` int64 [slots] at ``token_slots`` int32
        [T]."""
        tokens = len(input_ids)
        if tokens:
            self._gather((-(-tokens // 128),), (128,), (input_ids, last_tokens, token_slots, np.int32(tokens)))

    def check_width(self, what: str, width: int) -> None:
        if width % self._vector:
            raise ValueError(f"{what} {width} is not a multiple of {self._vector} elements (16 bytes)")
