"""What a decoder-only checkpoint says about itself, in one form whatever the file format.

One decoder serves every family; families differ by *named* values here, never by a class of their own. A setting that
would change the forward pass and that the decoder does not implement is refused by name (see ``parse_hf_config`` and
``parse_gguf_metadata`` in this package), never ignored.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from executor_svc.weights.errors import CheckpointError


@dataclass(slots=True, frozen=True)
class RopeConfig:
    """Rotary position embedding over the whole head (half-split pairing, as in the Llama reference).

    ``kind``: ``default``; ``linear`` (positions divided by ``factor``); ``llama3`` (wavelength-dependent scaling);
    ``factors`` (``freq_factors[i]`` divides the i-th inverse frequency: how GGUF files carry llama3 scaling).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0  # tokens
    freq_factors: tuple[float, ...] = ()


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Sizes and named differences of a decoder. All counts are elements, all lengths tokens."""

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
        if not 0.0 < self.rope.theta < float("inf") or not 0.0 < self.rope.factor < float("inf"):
            raise CheckpointError(f"config: rope theta = {self.rope.theta!r}, factor = {self.rope.factor!r}")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token < self.vocab_size:
                raise CheckpointError(f"config: special token id {token} is outside the vocabulary")

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
        """A stable serialisation, for fingerprints."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()
