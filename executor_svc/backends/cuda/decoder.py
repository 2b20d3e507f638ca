"""The decoder on a device: the recipe of ``models/decoder.py``, in the weights' dtype, over the kernels."""

from __future__ import annotations

import torch

from executor_svc.backends.cuda.device import Device
from executor_svc.backends.cuda.graphs import DecodeGraphs
from executor_svc.backends.cuda.ops import KernelOps
from executor_svc.metadata import StepMetadata
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Apply, Decoder, DecoderLayer


class CudaDecoder(Decoder):
    """Implements ``Model``. ``run`` is what the runner calls: as ``forward``, with ids read where sampling left them,
    and from a captured graph where there is one."""

    ops: KernelOps

    def __init__(
        self,
        config: ModelConfig,
        facts: ModelFacts,
        device: Device,
        ops: KernelOps,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        head: Apply,
    ) -> None:
        """``embedding`` [vocab, hidden] in the activations' dtype; ``head`` gives float32."""
        super().__init__(config, facts, ops, embedding, layers, final_norm, head, row_tile=1)
        self.device = device
        self.dtype = embedding.dtype
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        self.ops.begin_step(metadata)
        return self.compute(input_ids, self.ops.step.wanted)

    def run(self, metadata: StepMetadata, last_tokens: torch.Tensor) -> torch.Tensor:
        """``last_tokens`` int64 [slots] on the device -> logits float32 [S, vocab], which stand until the next call."""
        if self._graphs is not None and (size := self._graphs.size_for(metadata)):
            self.ops.begin_step(metadata, size)
            return self._graphs.replay(size)[: metadata.num_rows]
        self.ops.begin_step(metadata)
        return self.compute(self.ops.gather_ids(last_tokens), self.ops.step.wanted)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        self._graphs = None  # they hold the former cache's addresses
        super().allocate_kv_cache(num_blocks, block_size)

    def reserve(self, max_rows: int, max_tokens: int, block_size: int) -> None:
        """Take the memory that steps of that size need besides weights, cache and activations. Drops graphs."""
        self._graphs = None
        self.ops.reserve(max_rows, max_tokens, block_size)

    @torch.inference_mode()
    def capture_graphs(self, last_tokens: torch.Tensor, max_rows: int) -> int:
        """Capture decode steps of up to ``max_rows`` rows; call it after the cache was allocated. -> how many"""
        self._graphs = DecodeGraphs(self, last_tokens, max_rows)
        return self._graphs.capture()
