"""What a decoder-only checkpoint says about itself, in one form whatever the file format.

One decoder serves every family; families differ by *named* values here, never by a class of their own. A setting that
would change the forward pass and that the decoder does not implement is refused by name (see ``parse_hf_config`` and
``parse_gguf_metadata`` in this package), never ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from executor_svc.weights.errors import CheckpointError

ACTIVATIONS = ("silu", "gelu_tanh")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
DIFFERENCES = (  # and "rotary_dim"
    "activation", "windows", "local_rope", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "sandwich_norms",
    "embedding_scale", "attention_scale", "attention_softcap", "final_softcap", "num_experts", "normalize_experts",
    "dense_layers",
)  # fmt: skip
# So that a hostile config cannot name parameters without end; the last is for the experts of all layers together.
MAX_LAYERS, MAX_EXPERTS, MAX_ALL_EXPERTS = 2048, 2048, 1 << 16


@dataclass(slots=True, frozen=True)
class RopeConfig:
    """Rotary position embedding (half-split pairing, as in the Llama reference); see ``models/rope.py``.

    ``kind``: ``default``; ``linear`` (positions divided by ``factor``); ``dynamic`` (the base grows with the length
    beyond ``original_context``); ``llama3`` (wavelength-dependent scaling); ``yarn``; ``longrope`` (``short_factors``
    or ``long_factors`` divide the inverse frequencies); ``factors`` (``freq_factors`` divide them: how GGUF files carry
    llama3 scaling). Factors are one a rotated pair.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0  # tokens
    freq_factors: tuple[float, ...] = ()
    rotary_dim: int = 0  # the first elements of each head, which rotate among themselves; 0: the whole head
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 32.0  # of yarn, turns within the original context
    beta_slow: float = 1.0
    truncate: bool = True  # of yarn: its ramp's ends are whole pairs
    short_factors: tuple[float, ...] = ()  # of longrope
    long_factors: tuple[float, ...] = ()

    def check(self, head_dim: int) -> None:
        """``CheckpointError`` naming a value that no table can be made of."""
        dim = self.rotary_dim or head_dim
        if self.kind not in ROPE_KINDS:
            raise CheckpointError(f"config: rope type {self.kind!r} is not supported (supported: {list(ROPE_KINDS)})")
        if dim % 2 or not 0 < dim <= head_dim:
            raise CheckpointError(f"config: rotary_dim = {self.rotary_dim} of heads of {head_dim}")
        for name in (
            "theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow",
        ):  # fmt: skip
            if not 0.0 < getattr(self, name) < math.inf:
                raise CheckpointError(f"config: rope {name} = {getattr(self, name)!r} is not a positive number")
        if self.kind in ("dynamic", "llama3", "yarn", "longrope") and not 0 < self.original_context < 2**31:
            raise CheckpointError(f"config: rope original context = {self.original_context!r} for type {self.kind!r}")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise CheckpointError(
                f"config: rope low_freq_factor = {self.low_freq_factor} is not below high_freq_factor"
            )
        if self.kind in ("dynamic", "yarn") and (self.theta <= 1.0 or dim <= 2 or self.factor < 1.0):
            raise CheckpointError(
                f"config: rope type {self.kind!r} of theta {self.theta}, factor {self.factor} and {dim} elements"
            )
        for name, kind in (("freq_factors", "factors"), ("short_factors", "longrope"), ("long_factors", "longrope")):
            factors = getattr(self, name)
            if len(factors) != (dim // 2 if self.kind == kind else 0):
                raise CheckpointError(f"config: rope {name}: {len(factors)} for {dim // 2} pairs, type {self.kind!r}")
            if not all(0.0 < factor < math.inf for factor in factors):
                raise CheckpointError(f"config: rope {name} are not all positive numbers")


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Sizes and named differences of a decoder. All counts are elements, all lengths tokens.

    The defaults of the differences are Llama's. Two things no path sees: offsets of norm weights (Gemma's ``1 + w``)
    are added when weights are read, and attention factors of a rope type (yarn, longrope) are part of its table.
    """

    family: str  # "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tie_embeddings: bool
    rope: RopeConfig = field(default_factory=RopeConfig)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    activation: str = "silu"  # of the MLP's gate; one of ACTIVATIONS
    windows: tuple[int, ...] = ()  # tokens that each layer's queries see, themselves included; 0, or (): all
    local_rope: RopeConfig | None = None  # of the layers with a window, where it differs from ``rope``
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before it rotates; weights [head_dim]
    sandwich_norms: bool = False  # the outputs of attention and MLP are normed too, before they are added
    embedding_scale: float = 1.0  # multiplies the embeddings
    attention_scale: float = 0.0  # multiplies the scores; 0: head_dim ** -0.5
    attention_softcap: float = 0.0  # scores become cap * tanh(scores / cap); 0: they do not
    final_softcap: float = 0.0  # the same for the logits
    num_experts: int = 0  # of each MLP; 0: a plain MLP
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    normalize_experts: bool = True  # the probabilities of a token's experts are divided by their sum
    dense_layers: tuple[int, ...] = ()  # layers that have a plain MLP beside layers with experts, ascending

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "context_length",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
                raise CheckpointError(f"config: {name} = {value!r} is not a positive 31-bit integer")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"config: {self.num_heads} heads do not group over {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise CheckpointError(f"config: head_dim = {self.head_dim} is odd; rotary embedding needs pairs")
        if not 0.0 < self.rms_norm_eps < 1.0:
            raise CheckpointError(f"config: rms_norm_eps = {self.rms_norm_eps!r}")
        if self.num_layers > MAX_LAYERS or self.num_experts > MAX_EXPERTS:
            raise CheckpointError(
                f"config: {self.num_layers} layers of {self.num_experts} experts; at most {MAX_LAYERS} of {MAX_EXPERTS}"
            )
        if self.num_layers * self.num_experts > MAX_ALL_EXPERTS:
            raise CheckpointError(
                f"config: {self.num_layers} layers of {self.num_experts} experts; at most {MAX_ALL_EXPERTS} in all"
            )
        for rope in (self.rope, *(() if self.local_rope is None else (self.local_rope,))):
            rope.check(self.head_dim)
        self._check_differences()
        self._check_experts()
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token < self.vocab_size:
                raise CheckpointError(f"config: special token id {token} is outside the vocabulary")

    def _check_differences(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise CheckpointError(f"config: activation {self.activation!r} is not supported ({list(ACTIVATIONS)})")
        if self.windows and len(self.windows) != self.num_layers:
            raise CheckpointError(f"config: {len(self.windows)} windows for {self.num_layers} layers")
        for window in self.windows:
            if not 0 <= window < 2**31:
                raise CheckpointError(f"config: a window of {window!r} tokens")
        if self.local_rope is not None and not self.windows:
            raise CheckpointError("config: a rope of layers with a window, but no layer has one")
        if self.local_rope is not None and self.local_rope.rotary_dim != self.rope.rotary_dim:
            raise CheckpointError("config: the two ropes rotate different parts of the heads")
        for name in ("embedding_scale", "attention_scale", "attention_softcap", "final_softcap"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf or (name == "embedding_scale" and value == 0.0):
                raise CheckpointError(f"config: {name} = {value!r}")

    def _check_experts(self) -> None:
        if not self.num_experts:
            if self.experts_per_token or self.expert_intermediate_size or self.dense_layers:
                raise CheckpointError("config: settings of experts, but num_experts = 0")
            return
        if not 0 < self.experts_per_token <= self.num_experts:
            raise CheckpointError(f"config: {self.experts_per_token!r} experts a token of {self.num_experts!r}")
        if not 0 < self.expert_intermediate_size < 2**31:
            raise CheckpointError(f"config: expert_intermediate_size = {self.expert_intermediate_size!r}")
        if list(self.dense_layers) != sorted(set(self.dense_layers) & set(range(self.num_layers))):
            raise CheckpointError(f"config: dense_layers = {self.dense_layers} of {self.num_layers} layers")

    def has_experts(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    def window(self, layer: int) -> int:
        """Tokens that a query of the layer sees, itself included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def score_scale(self) -> float:
        """What q k is multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that rotate, and the width of a rope table's rows."""
        return self.rope.rotary_dim or self.head_dim

    def differences(self) -> tuple[str, ...]:
        """Names of what this model does other than Llama, for implementations to say what they cannot do."""
        names = [
            each.name
            for each in dataclasses.fields(self)
            if each.name in DIFFERENCES and getattr(self, each.name) != each.default
        ]
        return (*names, *(("rotary_dim",) if self.rotary_dim != self.head_dim else ()))

    @property
    def q_size(self) -> int:
        """Elements of all query heads of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key (or value) heads of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def canonical_json(self) -> bytes:
        """A stable serialisation, for fingerprints. What has its default is left out, so that a difference added to
        this class alters the fingerprint of no model without it."""
        return json.dumps(_without_defaults(self), sort_keys=True).encode()


def _without_defaults(config: ModelConfig | RopeConfig) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if value != each.default:
            out[each.name] = _without_defaults(value) if isinstance(value, RopeConfig) else value
    return out
