"""Row counts at which a matrix product gives a row the same bits, found by probing when a model is loaded.

Matrix libraries pick kernels by the number of rows M, and the kernels sum in different orders, so a row's last bits
depend on M. Which M agree differs by CPU, library and shape, so it is measured, not assumed::

    every M that is ever run  =  blocks (512 ...)  +  chunks  +  one remainder, a multiple of ``tile``, <= chunk
    all of those M are probed =>  no call of any batch can have other bits

A probe multiplies M copies of one row: all M results must be equal (position does not matter) and equal to those of
every other M, with one thread and with several. The order of summation cannot depend on values, so one row suffices.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor_svc.backends.cpu.linear import Linear

log = logging.getLogger(__name__)

TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # cheapest first: a step is padded to a multiple of it
CHUNKS = (96, 48, 32, 16)
BLOCKS = (512, 192)  # sizes for long prefills, used where they agree
_LARGE = 1 << 23  # elements of a weight beyond which probing is limited to small M (the head)
_LARGE_CHUNKS, _LARGE_BLOCKS = (24, 16), (96,)


@dataclass(slots=True, frozen=True)
class RowScheme:
    """How many rows one call may have, for one weight shape."""

    tile: int
    chunk: int  # a multiple of tile
    blocks: tuple[int, ...]  # descending, each greater than chunk

    def pieces(self, rows: int) -> list[int]:
        """Split ``rows``, a multiple of the tile, into probed row counts."""
        out = []
        for size in (*self.blocks, self.chunk):
            count, rows = divmod(rows, size)
            out += [size] * count
        return [*out, rows] if rows else out


Key = tuple[str, int, int]  # the kind of a linear and its shape


def _key(linear: Linear) -> Key:
    return type(linear).__name__, *linear.shape


@dataclass(slots=True, frozen=True)
class Probed:
    """The outcome for a model: one tile for all linears, a scheme for each kind and shape; ``digest`` covers the bits
    measured."""

    tile: int
    schemes: dict[Key, RowScheme]
    digest: str
    invariant: bool  # False: no scheme agreed over thread counts; rows are exact for this thread count only

    def scheme(self, linear: Linear) -> RowScheme:
        return self.schemes[_key(linear)]

    def padded(self, rows: int) -> int:
        return -(-rows // self.tile) * self.tile


class TiledLinear:
    """A linear whose rows do not depend on their number. Takes and returns row counts that are multiples of tile."""

    def __init__(self, linear: Linear, scheme: RowScheme) -> None:
        self._linear = linear
        self._scheme = scheme
        self._single = {scheme.chunk, *scheme.blocks}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        if rows <= self._scheme.chunk or rows in self._single:
            return self._linear(x)
        return torch.cat([self._linear(piece) for piece in x.split(self._scheme.pieces(rows))])


class _Prober:
    """Signatures of one linear at each (M, threads), computed once."""

    def __init__(self, linear: Linear, threads: Sequence[int]) -> None:
        self._linear = linear
        self.shape = linear.shape
        self._threads = threads
        generator = torch.Generator().manual_seed(7)
        self._row = torch.randn(1, linear.shape[1], generator=generator)
        self._signatures: dict[int, bytes | None] = {}

    def signature(self, rows: int) -> bytes | None:
        """A hash of the result's bits, or None where rows or thread counts disagree among themselves."""
        if rows not in self._signatures:
            self._signatures[rows] = self._measure(rows)
        return self._signatures[rows]

    def _measure(self, rows: int) -> bytes | None:
        x = self._row.expand(rows, -1).contiguous()
        first: torch.Tensor | None = None
        for count in self._threads:
            torch.set_num_threads(count)
            y = self._linear(x).view(torch.int32)
            first = y[:1].clone() if first is None else first
            if not bool((y == first).all()):
                return None
        assert first is not None
        return hashlib.sha256(first.numpy().tobytes()).digest()

    def agree(self, row_counts: Sequence[int]) -> bool:
        reference = self.signature(row_counts[0])
        return reference is not None and all(self.signature(m) == reference for m in row_counts[1:])


def probe(linears: Sequence[Linear], threads: int) -> Probed:
    """Find the smallest tile (and for each kind and shape the largest chunk) whose row counts all agree.

    ``linears``: one of each kind and shape is enough; more are ignored. Restores the thread count to ``threads``.
    """
    distinct: dict[Key, Linear] = {}
    for linear in linears:
        distinct.setdefault(_key(linear), linear)
    try:
        for counts, invariant in ((sorted({1, 2, threads}), True), ([threads], False)):
            probers = {key: _Prober(linear, counts) for key, linear in distinct.items()}
            for tile in TILES:
                schemes = {}
                for key, prober in probers.items():
                    scheme = _scheme(prober, tile)
                    if scheme is None:
                        break
                    schemes[key] = scheme
                else:
                    _log(tile, schemes, invariant)
                    return Probed(tile, schemes, _digest(probers, schemes), invariant)
    finally:
        torch.set_num_threads(threads)
    raise RuntimeError("no row count gives equal rows equal results: this matrix library cannot be used")


def _scheme(prober: _Prober, tile: int) -> RowScheme | None:
    large = prober.shape[0] * prober.shape[1] > _LARGE
    for chunk in _LARGE_CHUNKS if large else CHUNKS:
        chunk = chunk // tile * tile or tile
        if prober.agree(range(tile, chunk + 1, tile)):
            candidates = _LARGE_BLOCKS if large else BLOCKS
            blocks = tuple(b for b in candidates if b > chunk and b % tile == 0 and prober.agree((chunk, b)))
            return RowScheme(tile, chunk, blocks)
    return None


def _digest(probers: dict[Key, _Prober], schemes: dict[Key, RowScheme]) -> str:
    digest = hashlib.sha256()
    for key in sorted(probers):
        digest.update(repr(key).encode() + (probers[key].signature(schemes[key].chunk) or b""))
    return digest.hexdigest()


def _log(tile: int, schemes: dict[Key, RowScheme], invariant: bool) -> None:
    detail = ", ".join(f"{kind} {n}x{k}: {s.chunk} {list(s.blocks)}" for (kind, n, k), s in schemes.items())
    if invariant:
        log.info("row tile %d; chunk and blocks per shape: %s", tile, detail)
    else:
        log.warning("row tile %d holds for this thread count only; chunk and blocks per shape: %s", tile, detail)
