"""The decoder: one forward over a step's flat batch. Families differ by named values of ``ModelConfig``.

::

    x = embed(input_ids)                                  [T, hidden]
    per layer:  h = norm(x); qkv = W_qkv h                [T, q + 2 kv]
                (norm the heads of q and k); rotate q, k; write k, v to the pages
                x += (norm) W_o attend(q)
                h = norm(x); x += (norm) mlp(h)
    logits = softcap(W_head norm(x[logit_indices]))       [S, vocab]

    mlp(h) = W_down (activation(gate) * up)               with [gate; up] = W_gate_up h, or a mixture of such

What stands in brackets, biases, scales and caps are there where the config says so.
Nothing after the last layer's attention is needed for tokens whose logits are not, so they are dropped there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from executor_svc.backends.cpu.ops import CpuOps
from executor_svc.metadata import StepMetadata
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig

Apply = Callable[[torch.Tensor], torch.Tensor]  # [M, K] -> [M, N]


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    """One of ``experts`` and the pair ``gate_up`` and ``down`` is there. Linears add their biases themselves."""

    input_norm: torch.Tensor  # float32 [hidden]
    qkv: Apply  # [q + 2 kv, hidden]
    output: Apply  # [hidden, q]
    post_norm: torch.Tensor  # float32 [hidden], of the MLP's input
    gate_up: Apply | None = None  # [2 intermediate, hidden]
    down: Apply | None = None  # [hidden, intermediate]
    experts: Apply | None = None  # [T, hidden] -> [T, hidden]
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None  # float32 [head_dim] each, of query and key heads
    attention_norm: torch.Tensor | None = None  # float32 [hidden], of the attention's output
    mlp_norm: torch.Tensor | None = None  # float32 [hidden], of the MLP's output


def make_layer(
    config: ModelConfig,
    fused: Callable[..., Apply],
    norm: Callable[[str], torch.Tensor],
    gate_up: Apply | None,
    down: Apply | None,
    experts: Apply | None,
) -> DecoderLayer:
    """A layer by the checkpoint's names: ``fused(*names)`` is their joined linear, ``norm(name)`` a norm's weight."""
    sandwich = config.sandwich_norms
    return DecoderLayer(
        input_norm=norm("input_layernorm"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=fused("self_attn.o_proj"),
        post_norm=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        gate_up=gate_up,
        down=down,
        experts=experts,
        head_norms=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if config.qk_norm else None,
        attention_norm=norm("post_attention_layernorm") if sandwich else None,
        mlp_norm=norm("post_feedforward_layernorm") if sandwich else None,
    )


class Decoder:
    """Implements ``Model`` on the CPU; ``backends/cuda`` has what differs on a GPU."""

    dtype = torch.float32  # of the activations

    def __init__(
        self,
        config: ModelConfig,
        facts: ModelFacts,
        ops: CpuOps,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: torch.Tensor,
        head: Apply,
        row_tile: int,
    ) -> None:
        """``embedding`` [vocab, hidden] float32 or float16; ``row_tile``: the linears take multiples of it."""
        self.config = config
        self.facts = facts
        self.ops = ops
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._tile = row_tile
        self._activate: Apply = getattr(ops, f"{config.activation}_mul")

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens")
        self.ops.allocate_kv_cache(num_blocks, block_size)

    def kv_tensors(self) -> list[torch.Tensor]:
        """Every cache tensor, for tests that poison them."""
        return self.ops.kv_tensors()

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        self.ops.begin_step(metadata)
        return self.compute(input_ids, torch.from_numpy(metadata.logit_indices))

    def compute(self, input_ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The recipe, on whatever device: nothing here reads a tensor's values on the host. ``wanted`` int64 [S]."""
        ops = self.ops
        residual = self._embed(input_ids)
        last = len(self._layers) - 1
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            if delta is None:
                hidden = ops.rms_norm(residual, layer.input_norm)
            else:
                hidden = ops.add_rms_norm(residual, delta, layer.input_norm)
            qkv = layer.qkv(hidden)
            if layer.head_norms is not None:
                ops.norm_heads(qkv, *layer.head_norms)
            ops.rotate_and_cache(index, qkv)
            attended = ops.attend(index, qkv)
            if index == last:
                if len(wanted) == 0:
                    return residual.new_empty(0, self.config.vocab_size, dtype=torch.float32)
                attended, residual = self._pad(attended[wanted]), self._pad(residual[wanted])
            delta = layer.output(attended)
            if layer.attention_norm is not None:
                delta = ops.rms_norm(delta, layer.attention_norm)
            hidden = ops.add_rms_norm(residual, delta, layer.post_norm)
            delta = self._mlp(layer, hidden)
            if layer.mlp_norm is not None:
                delta = ops.rms_norm(delta, layer.mlp_norm)
        assert delta is not None
        logits = self._head(ops.add_rms_norm(residual, delta, self._final_norm))[: len(wanted)]
        return ops.softcap(logits, self.config.final_softcap) if self.config.final_softcap else logits

    def _mlp(self, layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
        if layer.experts is not None:
            return layer.experts(hidden)
        assert layer.gate_up is not None
        assert layer.down is not None
        return layer.down(self._activate(layer.gate_up(hidden)))

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> ``dtype`` [T padded to the row tile, hidden]; padding is zeros."""
        x = F.embedding(input_ids, self._embedding).to(self.dtype)
        return self._pad(x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        missing = -len(x) % self._tile
        return F.pad(x, (0, 0, 0, missing)) if missing else x
