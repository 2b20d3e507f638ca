"""The kernels behind the operations of the decoder: norms, rotary embedding, paged attention, activation.

The same interface as the CPU's operations (backends/cpu/ops.py), on the device and in the cache's dtype. The cache of
a layer is two tensors [num_blocks, kv_heads, block_size, head_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from executor_svc.backends.cuda.device import Device
from executor_svc.backends.cuda.staging import Staging
from executor_svc.backends.cuda.step import DeviceStep, StepLayout
from executor_svc.kernels.attention import AttentionShape, PagedAttention
from executor_svc.kernels.elementwise import ElementwiseKernels
from executor_svc.kernels.plan import most_slots
from executor_svc.kernels.table import MAX_GROUP
from executor_svc.metadata import StepMetadata
from executor_svc.models.config import ModelConfig

BLOCKS_PER_MULTIPROCESSOR = 2  # decode blocks that run at once: what shared memory allows
_FIRST_STAGING = 64 << 10  # bytes, where nobody said how large steps become


class KernelOps:
    """One instance per model; it owns the KV cache. Activations are contiguous, of ``dtype``, on the device; padded
    tokens (cache slot -1) leave the cache alone, and attention gives zeros for them."""

    name = "kernels"

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        rope: torch.Tensor,
        dtype: torch.dtype,
        local_rope: torch.Tensor | None = None,
    ) -> None:
        """``rope`` and ``local_rope`` are ``rope_table``: float32 [context, rotary_dim]. ``ValueError`` for a head
        size, group, width or dtype that the kernels do not have."""
        launcher = device.launcher
        self._device, self._launcher, self._config, self._dtype = device, launcher, config, dtype
        self._rope = rope.to(launcher.device)
        self._local_rope = self._rope if local_rope is None else local_rope.to(launcher.device)
        self._elementwise = ElementwiseKernels(launcher, dtype)
        self._elementwise.check_width("hidden size", config.hidden_size)
        if len(config.dense_layers) or not config.num_experts:
            self._elementwise.check_width("intermediate size", config.intermediate_size)
        self._target_blocks = BLOCKS_PER_MULTIPROCESSOR * launcher.num_multiprocessors
        windows = [config.window(layer) for layer in range(config.num_layers)]
        self._windows = sorted(set(windows))
        self._window_of = [self._windows.index(window) for window in windows]
        self._set_block_size(16)  # refuses what the kernels do not have, before weights are loaded
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        slots = most_slots(self._target_blocks, config.num_kv_heads) * config.num_kv_heads * MAX_GROUP
        self._workspace = (self._floats(slots * config.head_dim), self._floats(slots))
        self._staging = Staging(device, _FIRST_STAGING)
        self._head_norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self.step: DeviceStep  # of the last begin_step

    def _set_block_size(self, block_size: int) -> None:
        config = self._config
        shapes = [
            AttentionShape(
                self._dtype, config.num_heads, config.num_kv_heads, config.head_dim, block_size, config.score_scale,
                window, config.attention_softcap,
            )
            for window in self._windows
        ]  # fmt: skip
        self._attention = [PagedAttention(self._launcher, shape) for shape in shapes]
        self._layout = StepLayout(shapes, self._target_blocks)

    def _floats(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=self._launcher.device)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        config = self._config
        self._set_block_size(block_size)
        self._keys, self._values = [], []  # a former cache goes first
        size = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        for caches in (self._keys, self._values):
            for _ in range(config.num_layers):
                caches.append(torch.empty(size, dtype=self._dtype, device=self._launcher.device))

    def reserve(self, max_rows: int, max_tokens: int, block_size: int) -> None:
        """Take what steps of that size need, so that nothing grows later and addresses stay."""
        blocks = -(-len(self._rope) // block_size)
        self._staging = Staging(self._device, self._layout.most_bytes(max_rows, max_tokens, blocks))

    @property
    def inputs_at(self) -> int:
        """Address of the steps' inputs on the device: another one once a step was larger than what was reserved."""
        return self._staging.address

    def kv_tensors(self) -> list[torch.Tensor]:
        """Every cache tensor, for tests that poison them."""
        return [*self._keys, *self._values]

    def begin_step(self, metadata: StepMetadata, size: int | None = None) -> None:
        """Plan the step's attention and copy to the device what every layer shares: ``step``. ``size`` pads a decode
        step."""
        num_blocks, _, block_size, _ = self._keys[0].shape
        last_block = metadata.block_tables.max(initial=-1)
        last_slot = metadata.kv_slots.max(initial=-1)
        if last_block >= num_blocks or last_slot >= num_blocks * block_size:
            raise ValueError(f"the step names blocks that a cache of {num_blocks} does not have")
        if metadata.positions.max(initial=0) >= len(self._rope):
            raise ValueError(f"the step goes beyond the context of {len(self._rope)} tokens")
        self.step = self._layout.upload(metadata, self._staging, size)

    def gather_ids(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """The step's input ids, complete: those the host does not know come from ``last_tokens`` int64 [slots]."""
        step = self.step
        self._elementwise.gather_ids(step.input_ids, last_tokens, step.token_slots)
        return step.input_ids

    def padding(self) -> torch.Tensor | None:
        """int64 [T], negative where a token is padding; None where none is."""
        return self.step.kv_slots if self.step.padded else None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._elementwise.add_rms_norm(out, x, None, weight, self._config.rms_norm_eps)
        return out

    def add_rms_norm(self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(residual)
        self._elementwise.add_rms_norm(out, residual, delta, weight, self._config.rms_norm_eps)
        return out

    def norm_heads(self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> None:
        """Done by the kernel that rotates, which is called next."""
        self._head_norms = (q_weight, k_weight)

    def rotate_and_cache(self, layer: int, qkv: torch.Tensor) -> None:
        (q_norm, k_norm), self._head_norms = self._head_norms, (None, None)
        windowed = self._windows[self._window_of[layer]] > 0
        self._elementwise.rotate_and_cache(
            qkv,
            self._keys[layer],
            self._values[layer],
            self._local_rope if windowed else self._rope,
            self.step.positions,
            self.step.kv_slots,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self._config.rms_norm_eps,
        )

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(qkv), self._config.q_size, dtype=qkv.dtype, device=qkv.device)
        kind = self._window_of[layer]
        caches = (self._keys[layer], self._values[layer], self.step.block_tables)
        self._attention[kind](out, qkv, *caches, self.step.plans[kind], self._workspace)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
        self._elementwise.silu_mul(out, gate_up)
        return out

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return torch.tanh(x / cap) * cap
