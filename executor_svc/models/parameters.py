"""The canonical names and shapes of a decoder's parameters, and the rule that each is set exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from executor_svc.models.config import ModelConfig
from executor_svc.weights.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameter name inside a layer -> shape; matrices are [out features, in features]."""
    hidden = config.hidden_size
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (config.q_size, hidden),
        "self_attn.k_proj.weight": (config.kv_size, hidden),
        "self_attn.v_proj.weight": (config.kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, config.q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every parameter of the model (a tied head has none of its own)."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()})
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def checked_tensors(
    config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors through, refusing surplus, repeated, mis-shaped and (at the end) missing ones by name.

    A head stored beside tied embeddings is accepted only when it is the same matrix, and dropped.
    """
    missing = parameter_shapes(config)
    total = len(missing)
    seen: set[str] = set()
    embedding: torch.Tensor | None = None
    stored_head: torch.Tensor | None = None
    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"tensor {name} appears twice")
        seen.add(name)
        if name == HEAD and config.tie_embeddings:
            stored_head = tensor
            continue
        shape = missing.pop(name, None)
        if shape is None:
            raise CheckpointError(f"tensor {name} is not a parameter of this architecture")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if name == EMBEDDING and config.tie_embeddings:
            embedding = tensor
        yield name, tensor
    if missing:
        names = ", ".join(list(missing)[:3])
        raise CheckpointError(f"{len(missing)} of {total} tensors are missing: {names}{', ...' * (len(missing) > 3)}")
    if stored_head is not None and (embedding is None or not torch.equal(stored_head, embedding)):
        raise CheckpointError("lm_head.weight differs from the embeddings although the config ties them")
