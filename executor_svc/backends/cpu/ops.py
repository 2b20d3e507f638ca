"""What the decoder needs of a CPU implementation beside the linears: norms, activation, rotary, paged attention.

Every operation is *batch invariant*: the bits of a row's result depend on that row (and its own sequence's cache)
alone, whatever the number of rows, their order, their content, the chunking of prompts or the number of threads.
"""

from __future__ import annotations

from typing import Protocol

import torch

from executor_svc.metadata import StepMetadata


class CpuOps(Protocol):
    """One instance per model; it owns the KV cache. All tensors are contiguous float32; rows beyond the step's T
    tokens are padding, and attention leaves them zero."""

    name: str

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None: ...

    def kv_tensors(self) -> list[torch.Tensor]: ...

    def begin_step(self, metadata: StepMetadata) -> None:
        """Prepare what every layer of this step shares. ``ValueError`` if the metadata does not fit the cache."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, H], [H] -> [T, H]"""
        ...

    def add_rms_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``residual += delta`` in place, then its norm. [T, H], [T, H], [H] -> [T, H]"""
        ...

    def norm_heads(self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> None:
        """RMS norm of every query and key head inside ``qkv`` [T, q + 2 kv]; weights [head_dim]."""
        ...

    def rotate_and_cache(self, layer: int, qkv: torch.Tensor) -> None:
        """Rotate q and k inside ``qkv`` [T, q + 2 kv] by the layer's rope and write k and v to the step's
        ``kv_slots``."""
        ...

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step's rows over their cached pages, within the layer's window, scores scaled and
        capped as the config says. [T, q + 2 kv] -> [T, q]"""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up. [T, 2 I] (gate first) -> [T, I]"""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gelu(gate) * up, gelu in its tanh form. [T, 2 I] (gate first) -> [T, I]"""
        ...

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap tanh(x / cap), of any shape."""
        ...
