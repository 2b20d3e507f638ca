"""Launches of a mixture of experts: routing, the sort of (token, expert) pairs, grouped products, combination.

The host never knows which experts were chosen. Grids depend on the number of tokens alone, so a graph may hold the
launches; tiles that no rows fell into end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.kernels.attention import TYPE_NAMES
from executor_svc.kernels.launch import Launch, Launcher
from executor_svc.kernels.table import EXPERT_TILES, expert_columns, expert_smem

MAX_EXPERTS = 2048  # counters in shared memory (route_experts.cu)
MAX_PER_TOKEN = 32  # a lane each
_FEW_TOKENS = 64  # up to here the sort chooses as well: one launch less


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Of one layer. ``normalize``: the probabilities of a token's experts are divided by their sum."""

    dtype: torch.dtype
    hidden: int
    intermediate: int  # of one expert
    experts: int
    per_token: int
    normalize: bool

    def __post_init__(self) -> None:
        vector = 16 // self.dtype.itemsize
        for what, size in (("hidden size", self.hidden), ("intermediate size of an expert", self.intermediate)):
            if size % vector:
                raise ValueError(f"{what} {size} is not a multiple of {vector} elements (16 bytes)")
        if self.experts > MAX_EXPERTS or self.per_token > MAX_PER_TOKEN:
            raise ValueError(
                f"{self.per_token} of {self.experts} experts a token; at most {MAX_PER_TOKEN} of {MAX_EXPERTS}"
            )

    def tile_rows(self, tokens: int) -> int:
        """Rows of a tile: a few more than an expert gets on average, so that most experts' weights are read once."""
        if self.dtype == torch.float32:
            return 16
        rows = tokens * self.per_token / self.experts
        return next((size for size in EXPERT_TILES if rows <= 0.75 * size), EXPERT_TILES[-1])

    def most_tiles(self, tokens: int, tile_rows: int) -> int:
        """Tiles that ``tokens`` tokens can need, whatever experts they choose."""
        pairs = tokens * self.per_token
        used = min(pairs, self.experts)
        return used + (pairs - used) // tile_rows


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens go, on the device. N = tokens * per_token pairs; pair p is of token p // per_token."""

    ids: torch.Tensor  # int32 [T, per_token], likeliest first; -1: padding
    weights: torch.Tensor  # float32 [T, per_token]; undefined for padding
    pairs: torch.Tensor  # int32 [N], sorted by expert; undefined after the last
    tiles: torch.Tensor  # int32 [most_tiles, 4]: expert (-1: none), first place in ``pairs``, rows, 0
    tile_rows: int


class ExpertKernels:
    """All tensors are contiguous, of the shape's dtype unless said otherwise, and on the launcher's device."""

    def __init__(self, launcher: Launcher, shape: ExpertShape) -> None:
        name = TYPE_NAMES[shape.dtype]
        self._shape, self._device = shape, launcher.device
        self._logits = launcher.kernel(f"router_logits<{name}>")
        self._choose = launcher.kernel("choose_experts")
        self._sort = launcher.kernel("sort_pairs")
        self._combine = launcher.kernel(f"combine_experts<{name}>")
        self._products: dict[int, tuple[Launch, Launch]] = {
            rows: (launcher.kernel(f"expert_gate_up<{name}, {rows}>"), launcher.kernel(f"expert_down<{name}, {rows}>"))
            for rows in (EXPERT_TILES if name != "f32" else ())
        }
        if name == "f32":
            self._products[16] = (launcher.kernel("expert_gate_up_f32"), launcher.kernel("expert_down_f32"))

    def route(self, x: torch.Tensor, router: torch.Tensor, kv_slots: torch.Tensor | None = None) -> Routing:
        """The likeliest experts of each token by softmax over all, ties to the lower id. ``x`` [T, hidden]; ``router``
        float32 [experts, hidden]; where ``kv_slots`` int64 [T] is negative, the token is padding and goes nowhere."""
        shape, tokens = self._shape, len(x)
        tile_rows = shape.tile_rows(tokens)
        tiles = shape.most_tiles(tokens, tile_rows)
        logits = self._empty(torch.float32, tokens, shape.experts)
        ids, weights = (self._empty(dtype, tokens, shape.per_token) for dtype in (torch.int32, torch.float32))
        pairs, cut = self._empty(torch.int32, tokens * shape.per_token), self._empty(torch.int32, tiles, 4)
        if tokens:
            experts = np.int32(shape.experts)
            grid = (-(-shape.experts // 8), -(-tokens // 16))
            self._logits(grid, (128,), (logits, x, router, np.int32(tokens), experts, np.int32(shape.hidden)))
            sizes = (np.int32(tokens), experts, np.int32(shape.per_token), np.int32(shape.normalize))
            few = tokens <= _FEW_TOKENS
            if not few:
                self._choose((-(-tokens // 8),), (256,), (ids, weights, logits, kv_slots, *sizes))
            to_sort = (cut, pairs, ids, weights, logits if few else None, kv_slots)
            self._sort((1,), (1024,), (*to_sort, *sizes, np.int32(tile_rows), np.int32(tiles)))
        return Routing(ids, weights, pairs, cut, tile_rows)

    def apply(self, x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """``x`` [T, hidden] -> [T, hidden]; zeros for padding. ``gate_up`` [experts, 2 intermediate, hidden], the gate
        first; ``down`` [experts, hidden, intermediate]. Experts that no token goes to are not read."""
        shape, rows = self._shape, routing.tile_rows
        pairs, tiles = len(routing.pairs), len(routing.tiles)
        hidden = self._empty(shape.dtype, pairs, shape.intermediate)
        parts = self._empty(shape.dtype, pairs, shape.hidden)
        out = self._empty(shape.dtype, *x.shape)
        if len(x):
            gate_up_launch, down_launch = self._products[rows]
            size = 0 if shape.dtype == torch.float32 else rows
            columns, smem = expert_columns(size), expert_smem(size, shape.dtype.itemsize)
            wide, narrow = np.int32(shape.hidden), np.int32(shape.intermediate)
            places = (routing.tiles, routing.pairs)
            grid = (-(-2 * shape.intermediate // columns), tiles)
            args = (hidden, x, gate_up, *places, np.int32(shape.per_token), narrow, wide)
            gate_up_launch(grid, (128,), args, smem)
            down_launch(
                (-(-shape.hidden // columns), tiles), (128,), (parts, hidden, down, *places, wide, narrow), smem
            )
            vectors = -(-shape.hidden * shape.dtype.itemsize // 16)
            weights = (routing.weights, routing.ids, np.int32(shape.per_token), wide)
            self._combine((len(x), -(-vectors // 256)), (256,), (out, parts, *weights))
        return out

    def _empty(self, dtype: torch.dtype, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)
