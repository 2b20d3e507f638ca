"""The canonical names and shapes of a decoder's parameters, and the rule that each is set exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from executor_svc.models.config import ModelConfig
from executor_svc.weights.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Parameter name inside the layer -> shape; matrices are [out features, in features].

    Norms: without ``sandwich_norms`` ``post_attention_layernorm`` norms the MLP's input; with them it norms the
    attention's output, and ``pre_feedforward_layernorm`` and ``post_feedforward_layernorm`` the MLP's input and output.
    Experts: ``mlp.gate`` is the router; every expert's matrices are parameters of their own.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        **_linear("self_attn.q_proj", config.q_size, hidden, config.qkv_bias),
        **_linear("self_attn.k_proj", config.kv_size, hidden, config.qkv_bias),
        **_linear("self_attn.v_proj", config.kv_size, hidden, config.qkv_bias),
        **_linear("self_attn.o_proj", hidden, config.q_size, config.output_bias),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    if config.sandwich_norms:
        shapes |= {f"{name}_feedforward_layernorm.weight": (hidden,) for name in ("pre", "post")}
    if config.has_experts(layer):
        shapes |= _linear("mlp.gate", config.num_experts, hidden, False)
        for expert in range(config.num_experts):
            shapes |= _mlp(f"mlp.experts.{expert}", hidden, config.expert_intermediate_size, config.mlp_bias)
    else:
        shapes |= _mlp("mlp", hidden, config.intermediate_size, config.mlp_bias)
    return shapes


def _mlp(name: str, hidden: int, intermediate: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {
        **_linear(f"{name}.gate_proj", intermediate, hidden, bias),
        **_linear(f"{name}.up_proj", intermediate, hidden, bias),
        **_linear(f"{name}.down_proj", hidden, intermediate, bias),
    }


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    if bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every parameter of the model (a tied head has none of its own)."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()})
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
