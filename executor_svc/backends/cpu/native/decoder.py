"""A model whose forward is one call into compiled code."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from executor_svc.backends.cpu.native import layout as at
from executor_svc.backends.cpu.native.attention import scratch_floats
from executor_svc.backends.cpu.native.compile import load_forward
from executor_svc.backends.cpu.native.experts import router_scratch_floats
from executor_svc.backends.cpu.native.team import Context, Team
from executor_svc.backends.cpu.native.vector import LANES
from executor_svc.metadata import StepMetadata
from executor_svc.models.base import ModelFacts
from executor_svc.models.config import ModelConfig

Table = npt.NDArray[np.int64]
_GELU = 2.0 * math.sqrt(2.0 / math.pi)
_GATES = {"silu": (1.0, 0.0), "gelu_tanh": (_GELU, 0.044715 * _GELU)}  # see ``gate_mul_row``


class NativeDecoder:
    """Implements ``Model`` on the CPU. Tensors whose addresses are in a table are kept alive here."""

    def __init__(
        self,
        config: ModelConfig,
        facts: ModelFacts,
        weights: str,
        kv_type: str,
        threads: int,
        embedding: torch.Tensor,
        ropes: tuple[torch.Tensor, torch.Tensor],
        layers: list[dict[int, torch.Tensor]],
        final_norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        """``layers``: tensors by their column of the layer table; matrices packed in panels (gate and up panels, and
        their biases, alternating), norms and biases float32. ``ropes``: ``rope_table`` for layers without and with a
        window. ``embedding`` [vocab, hidden]. ``kv_type``: of the cache's elements, float16 or float32."""
        self.config = config
        self.facts = facts
        self._embedding = embedding
        self._floats = _float_table(config)
        self._layers = np.zeros((config.num_layers, at.LAYER_SIZE), np.int64)
        for index, (row, tensors) in enumerate(zip(self._layers, layers, strict=True)):
            row[list(tensors)] = [tensor.data_ptr() for tensor in tensors.values()]
            row[at.WINDOW] = window = config.window(index)
            row[at.ROPE] = ropes[window > 0].data_ptr()
        self._head_panels = head.shape[0]
        self._model = np.zeros(at.MODEL_SIZE, np.int64)
        self._model[: at.BLOCK_SIZE] = (
            config.num_layers, config.hidden_size, config.q_size, config.kv_size, config.intermediate_size,
            config.head_dim, config.num_kv_heads, config.group_size, self._head_panels,
        )  # fmt: skip
        self._model[at.ROTARY_DIM] = config.rotary_dim
        self._model[at.NUM_EXPERTS : at.NORMALIZE_EXPERTS + 1] = (
            config.num_experts, config.experts_per_token, config.expert_intermediate_size, config.normalize_experts,
        )  # fmt: skip
        routed = next((tensors for tensors in layers if at.ROUTER in tensors), None)
        if routed is not None:
            self._model[at.EXPERT_GATE_UP_BYTES] = routed[at.GATE_UP][0].nbytes
            self._model[at.EXPERT_DOWN_BYTES] = routed[at.DOWN][0].nbytes
        self._model[at.FINAL_NORM] = final_norm.data_ptr()
        self._model[at.HEAD] = head.data_ptr()
        self._model[at.LAYERS] = self._layers.ctypes.data
        self._model[at.FLOATS] = self._floats.ctypes.data
        self._kept = [*ropes, final_norm, head, *(tensor for tensors in layers for tensor in tensors.values())]
        self._caches: list[torch.Tensor] = []
        self._num_slots = 0
        self._phases = _phases(config)
        counter_size = (len(self._phases) + 1) * at.COUNTER_BYTES // 8
        kept = self._model, self._layers, self._floats
        self._team = Team(load_forward(weights, kv_type), threads, at.STEP_SIZE, counter_size, kept)
        self._last: Context | None = None
        floats = max(scratch_floats(config.head_dim), router_scratch_floats(config.num_experts))
        scratch_bytes = -(-floats * 4 // 4096) * 4096  # no two threads share a page
        self._scratch = torch.zeros(threads * scratch_bytes // 4 + 1024)
        self._step = np.zeros(at.STEP_SIZE, np.int64)  # what is the same in every step
        self._step[at.MODEL] = self._model.ctypes.data
        self._step[at.SCRATCH] = -(-self._scratch.data_ptr() // 4096) * 4096
        self._step[at.SCRATCH_BYTES] = scratch_bytes
        self._weights, self._kv_type = weights, kv_type
        self._capacity = 0  # rows that the buffers hold
        self._buffers: list[torch.Tensor] = []

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks} blocks of {block_size} tokens")
        config = self.config
        self._num_slots = num_blocks * block_size
        groups = -(-self._num_slots // LANES)
        shape = (groups, config.num_kv_heads, LANES * config.head_dim)
        kind = torch.float16 if self._kv_type == "float16" else torch.float32
        self._caches = [torch.empty(shape, dtype=kind) for _ in range(2 * config.num_layers)]
        addresses = np.array([tensor.data_ptr() for tensor in self._caches]).reshape(-1, 2)
        self._layers[:, at.KEYS : at.VALUES + 1] = addresses
        self._model[at.BLOCK_SIZE] = block_size

    def kv_tensors(self) -> list[torch.Tensor]:
        """Every cache tensor, for tests that poison them."""
        return self._caches

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, metadata: StepMetadata) -> torch.Tensor:
        tokens, wanted = metadata.num_tokens, len(metadata.logit_indices)
        if tokens == 0:
            return torch.empty(0, self.config.vocab_size)
        self._check(metadata)
        self._reserve(max(tokens, wanted))
        x = self._buffers[0]
        x[:tokens] = F.embedding(input_ids, self._embedding)
        if self.config.embedding_scale != 1.0:
            x[:tokens] *= self.config.embedding_scale
        logits = torch.empty(wanted, self._head_panels * LANES)
        items = attention_items(metadata, max(1, at.QUERY_ROWS // self.config.group_size))
        tables = np.ascontiguousarray(metadata.block_tables, np.int64)
        # Named, not passed as temporaries: the compiled code reads them by address.
        positions = np.ascontiguousarray(metadata.positions, np.int64)
        kv_slots = np.ascontiguousarray(metadata.kv_slots, np.int64)
        indices = np.ascontiguousarray(metadata.logit_indices, np.int64)
        context = self._team.context()
        step = context.step
        step[:] = self._step
        step[at.COUNTERS] = context.counters.ctypes.data
        step[: at.MAX_BLOCKS + 1] = tokens, wanted, len(items), tables.shape[1]
        step[at.LOGITS] = logits.data_ptr()
        step[at.POSITIONS : at.ITEMS + 1] = (
            positions.ctypes.data, kv_slots.ctypes.data, indices.ctypes.data, tables.ctypes.data, items.ctypes.data
        )  # fmt: skip
        self._team.run(context)
        self._last = context
        return logits[:, : self.config.vocab_size]

    def _check(self, metadata: StepMetadata) -> None:
        """Compiled code has no bounds checks, so nothing out of bounds may reach it."""
        positions, slots = metadata.positions, metadata.kv_slots
        if not self._caches:
            raise RuntimeError("no KV cache was allocated")
        if int(positions.min()) < 0 or int(positions.max()) >= self.config.context_length:
            raise ValueError(f"a position is outside the context of {self.config.context_length}")
        if int(slots.min()) < 0 or int(slots.max()) >= self._num_slots:
            raise ValueError(f"a KV slot is outside the cache of {self._num_slots}")
        block_size = int(self._model[at.BLOCK_SIZE])
        if int(metadata.seq_lens.min()) < 0 or int(metadata.query_lens.min()) < 1:
            raise ValueError("a row has a negative length or no new token")
        needed = -(-(metadata.seq_lens.astype(np.int64) + metadata.query_lens) // block_size)
        tables = metadata.block_tables
        if int(needed.max()) > tables.shape[1]:
            raise ValueError("a row is longer than its block table")
        used = np.arange(tables.shape[1]) < needed[:, None]
        if int(np.where(used, tables, 0).min()) < 0 or int(tables.max()) * block_size >= self._num_slots:
            raise ValueError("a block table names a block outside the cache")
        indices = metadata.logit_indices
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= metadata.num_tokens):
            raise ValueError("a logit index is outside the step's tokens")

    def _reserve(self, rows: int) -> None:
        """Buffers for a step of ``rows`` tokens; they only grow."""
        if rows <= self._capacity:
            return
        config = self.config
        capacity = -(-rows // 64) * 64
        inner = max(config.intermediate_size, config.experts_per_token * config.expert_intermediate_size)
        widths = (
            config.hidden_size, config.hidden_size, config.hidden_size, config.q_size + 2 * config.kv_size,
            config.q_size, 2 * inner, inner,
        )  # fmt: skip
        self._buffers = [torch.zeros(capacity, width) for width in (*widths, config.hidden_size, config.q_size)]
        addresses = [buffer.data_ptr() for buffer in self._buffers]
        self._step[at.X : at.X + len(widths)] = addresses[: len(widths)]
        self._step[at.X_WANTED : at.ATTENDED_WANTED + 1] = addresses[len(widths) :]
        rows = capacity * max(1, config.experts_per_token)
        if self._weights == "int8":
            most = max(config.hidden_size, config.q_size, config.intermediate_size, config.expert_intermediate_size)
            self._quantized = torch.zeros(rows, 3 * most, dtype=torch.uint8)
            self._step[at.QUANTIZED] = self._quantized.data_ptr()
        if config.num_experts:
            self._reserve_experts(rows)
        self._capacity = capacity

    def _reserve_experts(self, entries: int) -> None:
        """Buffers from EXPERT_IDS to EXPERT_OUT; ``entries``: tokens times experts of each."""
        config = self.config
        blocks = at.BLOCK_ENTRY * (config.num_experts + entries // at.ROW_BLOCK)
        sizes = entries, entries, entries, entries, config.num_experts, blocks
        tables = [torch.zeros(size, dtype=torch.int64) for size in sizes]
        rows = [torch.zeros(entries, config.hidden_size) for _ in range(2)]
        self._expert_buffers = [*tables, *rows]
        self._step[at.EXPERT_IDS : at.EXPERT_OUT + 1] = [buffer.data_ptr() for buffer in self._expert_buffers]

    def phase_shares(self) -> dict[str, float]:
        """How the last forward's time divides over the kinds of phases; the shares sum to 1."""
        if self._last is None:
            raise RuntimeError("no forward has run")
        ends = self._last.counters.reshape(-1, at.COUNTER_BYTES // 8)[:, at.CYCLES_OFFSET // 8]
        ends = ends[ends > 0]  # a step that wants no logits ends early
        spent = np.diff(ends).clip(min=0)
        shares = dict.fromkeys(self._phases, 0.0)
        for phase, ticks in zip(self._phases, spent, strict=False):
            shares[phase] += float(ticks) / max(float(spent.sum()), 1.0)
        return shares


def _phases(config: ModelConfig) -> list[str]:
    """The names of a step's phases in order, the last of which need not run."""
    names: list[str] = []
    for layer in range(config.num_layers):
        names += at.ATTENTION_PHASES
        if layer == config.num_layers - 1:
            names.insert(len(names) - 2, "gather")
        names += at.EXPERT_PHASES if config.has_experts(layer) else at.MLP_PHASES
    return [*names, *at.LAST_PHASES]


def _float_table(config: ModelConfig) -> npt.NDArray[np.float32]:
    """See ``layout``: the float table."""
    floats = np.zeros(at.FLOATS_SIZE, np.float32)
    floats[at.EPSILON] = config.rms_norm_eps
    floats[at.INVERSE_HIDDEN], floats[at.INVERSE_HEAD] = 1.0 / config.hidden_size, 1.0 / config.head_dim
    floats[at.SOFTMAX_FACTOR] = math.log2(math.e) * (1.0 if config.attention_softcap else config.score_scale)
    if config.attention_softcap:
        floats[at.BEFORE_SCORE_CAP] = config.score_scale / config.attention_softcap
        floats[at.SCORE_CAP] = config.attention_softcap
    if config.final_softcap:
        floats[at.BEFORE_LOGIT_CAP], floats[at.LOGIT_CAP] = 1.0 / config.final_softcap, config.final_softcap
    floats[at.GATE_LINEAR : at.GATE_CUBIC + 1] = _GATES[config.activation]
    return floats


def attention_items(metadata: StepMetadata, most: int) -> Table:
    """int64 [items, ITEM_SIZE]: each row's new tokens in runs of at most ``most``."""
    lens = metadata.query_lens.astype(np.int64)
    pieces = -(-lens // most)
    rows = np.repeat(np.arange(len(lens)), pieces)
    offsets = (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    items = np.empty((len(rows), at.ITEM_SIZE), np.int64)
    items[:, at.ITEM_ROW] = rows
    items[:, at.ITEM_TOKEN] = metadata.query_starts[rows] + offsets
    items[:, at.ITEM_COUNT] = np.minimum(most, lens[rows] - offsets)
    items[:, at.ITEM_POSITION] = metadata.seq_lens[rows] + offsets
    return items
