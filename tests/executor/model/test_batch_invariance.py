"""A row's logits have the same bits whatever the batch, the chunking, the threads, or the content of other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.backends.cpu.linear import make_linear
from executor_svc.backends.cpu.row_tile import RowScheme, TiledLinear, probe
from tests.executor.model.batch import Sequence, run

ATTENTION = ["numba", "torch"]
WEIGHTS = ["float32", "float16", "int8"]
# (N, K) of the fused matrices of the real model; the head's first columns stand for all of it.
REAL_SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (4096, 576)]


def ids_of(seed: int, count: int) -> list[int]:
    return torch.randint(3, 384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def blocks_of(index: int) -> list[int]:
    return list(range(index * 10, index * 10 + 10))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_batch_chunks_and_threads_do_not_change_bits(tiny: Path, load: Any, weights: str, attention: str) -> None:
    ids = ids_of(1, 140)
    alone = Sequence(ids, blocks_of(0))
    run(load(tiny, weights, attention, threads=1), [(alone, 140)], 16)
    expected = alone.logits[0]
    for threads in (1, 2):
        model = load(tiny, weights, attention, threads=threads, blocks=400)
        slow = attention == "torch" and threads == 2
        for chunk, others in ((64, 12),) if slow else ((1, 0), (1, 5), (7, 3), (64, 12), (139, 30)):
            row = Sequence(ids, blocks_of(0))
            mates = [Sequence(ids_of(9 + i, 150), blocks_of(1 + i)) for i in range(others)]
            for mate in mates:
                run(model, [(mate, 3 + 2 * mate.blocks[0] % 11)], 16)
            while row.length < len(ids):
                count = min(chunk, len(ids) - row.length)
                rows = [(mate, 1) for mate in mates if mate.length < 150]
                position = 0 if count == 1 else len(rows)  # decode rows come first
                run(model, [*rows[:position], (row, count), *rows[position:]], 16)
            got = torch.cat(row.logits)
            assert torch.equal(got, expected), f"threads {threads}, chunk {chunk}, {others} other rows"


@pytest.mark.parametrize("attention", ATTENTION)
def test_every_batch_size_gives_the_same_bits(tiny: Path, load: Any, attention: str) -> None:
    """One prefilled prefix, continued by 1..70 rows at once, each row reading the same shared pages."""
    model = load(tiny, "float16", attention, blocks=400)
    prefix = Sequence(ids_of(3, 32), [0, 1])
    run(model, [(prefix, 32)], 16)
    expected: torch.Tensor | None = None
    for size in [*range(1, 20), 31, 32, 33, 47, 48, 49, 63, 64, 65, 70]:
        last = [77 if i == size // 2 else 78 + i for i in range(size)]
        rows = [(Sequence([*prefix.ids, last[i]], [0, 1, 2 + i], length=32), 1) for i in range(size)]
        logits = run(model, rows, 16)[size // 2]
        expected = logits if expected is None else expected
        assert torch.equal(logits, expected), f"{size} rows"


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_broken_cache_harms_only_itself(tiny: Path, load: Any, attention: str, bad: float) -> None:
    model = load(tiny, "float16", attention)
    sound, broken = Sequence(ids_of(5, 60), blocks_of(0)), Sequence(ids_of(6, 60), blocks_of(1))
    run(model, [(sound, 40), (broken, 40)], 16)
    alone = Sequence(sound.ids, sound.blocks, length=40)
    expected = run(model, [(alone, 1)], 16)[0]
    for tensor in model.kv_tensors():  # both layouts have the block as their leading axis or its 16 slots
        per_block = tensor.view(256, -1)
        per_block[broken.blocks[0]] = bad
    logits = run(model, [(broken, 1), (sound, 1)], 16)
    assert not torch.isfinite(logits[0]).any()
    assert torch.equal(logits[1], expected)


@pytest.mark.timeout(400)  # half a minute alone, more than two beside other work
@pytest.mark.parametrize("weights", WEIGHTS)
def test_row_schemes_of_the_real_shapes_hold_for_every_row_count(weights: str) -> None:
    """torch's products, split as probed: every M in 1..511 gives the bits of the whole, with 1 and 2 threads."""
    generator = torch.Generator().manual_seed(0)
    linears = [make_linear(torch.randn(n, k, generator=generator) * 0.05, weights) for n, k in REAL_SHAPES]
    probed = probe(linears, threads=1)
    x = {k: torch.randn(512, k, generator=generator) for _, k in REAL_SHAPES}
    try:
        for linear in linears[:4]:
            tiled = TiledLinear(linear, probed.scheme(linear))
            data = x[linear.shape[1]]
            torch.set_num_threads(1)
            whole = tiled(data[: probed.padded(500)])
            for m in range(1, 512):
                rows = torch.nn.functional.pad(data[:m], (0, 0, 0, probed.padded(m) - m))
                compared = min(m, 500)
                # Threads split the columns: two are tried at a few row counts, being slow on a busy machine.
                torch.set_num_threads(2 if m in (1, 35, 131) else 1)
                assert torch.equal(tiled(rows)[:compared], whole[:compared]), f"{weights} {linear.shape} M = {m}"
    finally:
        torch.set_num_threads(2)


@pytest.mark.parametrize("rows", [*range(0, 400, 7), 512, 1000, 1024])
def test_pieces_are_row_counts_that_were_probed(rows: int) -> None:
    scheme = RowScheme(tile=1, chunk=96, blocks=(512, 192))
    pieces = scheme.pieces(rows)
    assert sum(pieces) == rows
    assert all(piece in (512, 192) or piece <= 96 for piece in pieces)


def test_compiled_products_do_not_depend_on_rows_or_register_tiles() -> None:
    """The compiled tiles of AVX-512 and of AVX2, on the real shapes: the same bits for every M."""
    numba = pytest.importorskip("numba")
    from executor_svc.backends.cpu.native.gemm import TILES_AVX2, TILES_AVX512, make_block, pack_panels

    def entry(tiles: dict[int, int]) -> Any:
        block = make_block("float16", tiles)

        @numba.njit(nogil=True)
        def product(rows, panels, x, k, w, y):  # type: ignore[no-untyped-def]
            block(rows, panels, x, 4 * k, w, 32 * k, k, y, 64 * panels)

        return product

    wide, narrow = entry(TILES_AVX512), entry(TILES_AVX2)
    generator = torch.Generator().manual_seed(0)
    for n, k in REAL_SHAPES[:4]:
        weight = torch.randn(n, k, generator=generator) * 0.05
        packed = pack_panels(weight, "float16")
        x = torch.randn(511, k, generator=generator)
        outputs = []
        for product in (wide, narrow):
            y = torch.empty(511, n)
            product(511, n // 16, x.data_ptr(), k, packed.data_ptr(), y.data_ptr())
            outputs.append(y)
        assert torch.equal(*outputs)
        torch.testing.assert_close(outputs[0], x @ weight.half().float().T, atol=1e-4, rtol=1e-4)
        for m in [*range(1, 40), *range(40, 511, 19)]:
            y = torch.empty(m, n)
            wide(m, n // 16, x.data_ptr(), k, packed.data_ptr(), y.data_ptr())
            assert torch.equal(y, outputs[0][:m]), f"{n}x{k} M = {m}"
