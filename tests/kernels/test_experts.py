"""Mixtures of experts against float64: routing, the sort of pairs, grouped products, what is read, planted bugs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bench.experts import Layer
from executor_svc.backends.cuda import graphs
from executor_svc.kernels.experts import ExpertKernels, ExpertShape, Routing
from executor_svc.kernels.launch import Launcher
from executor_svc.kernels.table import EXPERT_TILES
from tests.kernels import references
from tests.kernels.backends import make_device, make_launcher
from tests.kernels.planting import IN_FLIGHT, WRONG, Bug, assert_found, plant
from tests.kernels.ptx.errors import PtxError
from tests.kernels.ptx.launcher import PtxLauncher
from tests.kernels.tiny_models import MIXTRAL, Batch, cpu_model, cuda_model

pytestmark = pytest.mark.nvrtc

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1.2e-2, F16: 1.5e-3, F32: 3e-6}  # of a token's largest value


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launches take for outputs and workspaces is NaN, or a huge integer."""

    def empty(kernels: ExpertKernels, dtype: torch.dtype, *size: int) -> torch.Tensor:
        value = torch.nan if dtype.is_floating_point else 1 << 30
        return torch.full(size, value, dtype=dtype, device=kernels._device)

    monkeypatch.setattr(ExpertKernels, "_empty", empty)


@dataclass
class Case:
    """Random weights of a layer, and tokens. ``chosen``: experts that the router likes; none: all alike."""

    shape: ExpertShape
    x: torch.Tensor
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def run(self, launcher: Launcher, kv_slots: torch.Tensor | None = None) -> tuple[torch.Tensor, Routing]:
        kernels = ExpertKernels(launcher, self.shape)
        routing = kernels.route(self.x, self.router, kv_slots)
        return kernels.apply(self.x, routing, self.gate_up, self.down), routing

    def error(self, out: torch.Tensor, routing: Routing) -> float:
        """Of each token: the largest error over its largest expected value. NaN counts as infinite."""
        expected = references.experts(self.x, routing.ids, routing.weights, self.gate_up, self.down)
        error = (out.double() - expected).abs().nan_to_num(nan=float("inf")).amax(dim=1)
        return float((error / expected.abs().amax(dim=1)).max())


def make_case(
    tokens: int,
    dtype: torch.dtype = BF16,
    hidden: int = 136,
    intermediate: int = 72,
    experts: int = 8,
    per_token: int = 2,
    normalize: bool = True,
    chosen: int | None = None,
) -> Case:
    """The default sizes are no multiples of any tile. ``chosen``: the router prefers that many experts, the last ones;
    the others' weights are NaN."""
    generator = torch.Generator().manual_seed(tokens)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    x = randn(tokens, hidden).to(dtype)
    router = randn(experts, hidden) * hidden**-0.5 * 3
    gate_up = (randn(experts, 2 * intermediate, hidden) * hidden**-0.5).to(dtype)
    down = (randn(experts, hidden, intermediate) * intermediate**-0.5).to(dtype)
    if chosen is not None:
        x[:, 0] = 1.0
        router[:-chosen, 0] -= 100.0
        gate_up[:-chosen], down[:-chosen] = torch.nan, torch.nan
    return Case(ExpertShape(dtype, hidden, intermediate, experts, per_token, normalize), x, router, gate_up, down)


def check_tiles(routing: Routing) -> None:
    """Every pair that is not padding stands once, among its expert's places; no tile is too long."""
    ids, pairs = routing.ids.flatten().tolist(), routing.pairs.tolist()
    tiles = [tile for tile in routing.tiles.tolist() if tile[0] >= 0]
    assert routing.tiles[len(tiles) :].eq(torch.tensor([-1, 0, 0, 0])).all()
    place = 0
    for expert, first, rows, _ in tiles:
        assert first == place
        assert 0 < rows <= routing.tile_rows
        assert all(ids[pair] == expert for pair in pairs[first : first + rows])
        place += rows
    assert sorted(pairs[:place]) == [pair for pair, expert in enumerate(ids) if expert >= 0]
    assert [tile[0] for tile in tiles] == sorted(tile[0] for tile in tiles)
    full = {tile[0]: 0 for tile in tiles}
    for expert, _, rows, _ in tiles:
        full[expert] += rows
    assert len(tiles) == sum(-(-rows // routing.tile_rows) for rows in full.values())


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "normalize", "dtype"),
    [
        (1, 8, 2, True, BF16),
        (5, 60, 4, False, F32),
        (66, 128, 8, True, F16),  # more than the sort chooses for
        (65, 3, 3, False, BF16),
        (9, 40, 32, True, F32),
    ],
)
def test_routing(tokens: int, experts: int, per_token: int, normalize: bool, dtype: torch.dtype) -> None:
    case = make_case(tokens, dtype, 72, 8, experts, per_token, normalize)
    routing = ExpertKernels(make_launcher(), case.shape).route(case.x, case.router)
    weights, ids = references.route(case.x, case.router, per_token, normalize)
    assert torch.equal(routing.ids.long(), ids)
    torch.testing.assert_close(routing.weights.double(), weights, rtol=1e-5, atol=0)
    check_tiles(routing)


@pytest.mark.parametrize("tokens", [3, 70])
def test_ties_go_to_the_lower_id_and_nan_chooses_something(tokens: int) -> None:
    case = make_case(tokens, F32, experts=40, per_token=3)
    case.router[7], case.router[35] = case.router[33], case.router[33]
    case.x[:] = case.router[33] * 10
    case.x[1] = torch.nan
    out, routing = case.run(make_launcher())
    assert routing.ids[0].tolist() == routing.ids[2].tolist() == [7, 33, 35]
    torch.testing.assert_close(routing.weights[0], torch.full((3,), 1 / 3))
    assert routing.weights[1].isnan().all()
    assert routing.ids[1].tolist() == [0, 1, 2]
    assert out[1].isnan().all()
    assert out[0].isfinite().all()


@pytest.mark.parametrize("tokens", [4, 70])
def test_padding_goes_nowhere(tokens: int) -> None:
    """Padded rows are zeros, choose no expert, and change nothing for the others."""
    case = make_case(tokens)
    slots = torch.arange(tokens)
    slots[1::3] = -1
    out, routing = case.run(make_launcher(), slots)
    alone, all_routing = case.run(make_launcher())
    padded = slots < 0
    assert routing.ids[padded].eq(-1).all()
    assert out[padded].eq(0).all()
    assert torch.equal(out[~padded], alone[~padded])
    assert torch.equal(routing.weights[~padded], all_routing.weights[~padded])
    check_tiles(routing)


def test_padding_alone_reads_nothing() -> None:
    case = make_case(4)
    out, routing = case.run(make_launcher(), torch.full((4,), -1))
    assert routing.tiles[:, 0].eq(-1).all()
    assert out.eq(0).all()


# tokens, and the tile that so many choose with two of eight experts each.
SIZES = [(1, 16), (40, 16), (110, 64), (200, 128)]
USUAL: list[tuple[Any, ...]] = [
    (1, BF16, {"hidden": 264, "intermediate": 40}),  # several stages of the depth
    (3, F16, {"hidden": 8, "intermediate": 8}),
    (12, BF16, {"experts": 20, "per_token": 4}),
    (50, BF16, {"experts": 4, "per_token": 1}),
    (100, F16, {"experts": 2, "per_token": 1, "hidden": 200}),
    (100, BF16, {"experts": 3, "per_token": 2, "normalize": False}),
    (1, F32, {}),
    (9, F32, {"experts": 3, "per_token": 3, "normalize": False}),
]


def _identify(case: Any) -> str:
    return re.sub(r"[^\w.]+", "-", str(case)).strip("-")


@pytest.mark.parametrize(("tokens", "dtype", "sizes"), USUAL, ids=_identify)
def test_products(tokens: int, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    case = make_case(tokens, dtype, **sizes)
    out, routing = case.run(make_launcher())
    assert case.error(out, routing) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(("tokens", "tile_rows"), SIZES)
def test_every_specialisation(tokens: int, tile_rows: int, dtype: torch.dtype) -> None:
    for hidden, intermediate, chosen in ((64, 32, None), (136, 136, 2), (264, 40, None)):
        case = make_case(tokens, dtype, hidden, intermediate, chosen=chosen)
        out, routing = case.run(make_launcher())
        assert routing.tile_rows == (16 if dtype == F32 else tile_rows)
        check_tiles(routing)
        assert case.error(out, routing) < TOLERANCE[dtype], (hidden, intermediate, chosen)


def test_every_tile_is_among_the_usual_cases() -> None:
    found = {
        make_case(tokens, dtype, **sizes).shape.tile_rows(tokens) for tokens, dtype, sizes in USUAL if dtype != F32
    }
    assert found == set(EXPERT_TILES)
    assert {make_case(tokens).shape.tile_rows(tokens) for tokens, _ in SIZES} == set(EXPERT_TILES)


def test_the_grid_has_just_enough_tiles() -> None:
    """For the worst choice: every expert one row, and full tiles of one."""
    for experts, per_token, tokens in itertools.product((2, 8, 60), (1, 2), (1, 7, 100, 1000)):
        shape = ExpertShape(BF16, 64, 64, experts, per_token, True)
        rows, pairs = shape.tile_rows(tokens), tokens * per_token
        counts = [1] * min(experts, pairs)
        counts[0] += pairs - len(counts)
        assert sum(-(-count // rows) for count in counts) == shape.most_tiles(tokens, rows)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """Bit for bit: alone, among few and among many, with every tile, as one chooses the sort and as all tokens do."""
    case = make_case(100, dtype, experts=3, per_token=2)
    whole, routing = case.run(make_launcher(check_races=False))
    for rows in ([7], [7, 99, 3, 12], range(60)):
        part = Case(case.shape, case.x[list(rows)], case.router, case.gate_up, case.down)
        out, part_routing = part.run(make_launcher(check_races=False))
        assert dtype == F32 or part_routing.tile_rows < routing.tile_rows
        assert torch.equal(part_routing.weights, routing.weights[list(rows)])
        assert torch.equal(out, whole[list(rows)])


def _far_error(launcher: Launcher) -> float:
    """Of an expert whose matrices begin past 2**31 elements. Pages that nobody touches cost no memory."""
    hidden, intermediate, experts = 1024, 1088, 2048
    last = experts - 1
    assert last * hidden * intermediate > 1 << 31
    shape = ExpertShape(BF16, hidden, intermediate, experts, 1, True)
    gate_up = torch.empty(experts, 2 * intermediate, hidden, dtype=BF16)
    down = torch.empty(experts, hidden, intermediate, dtype=BF16)
    generator = torch.Generator().manual_seed(0)
    gate_up[last] = torch.randn(2 * intermediate, hidden, generator=generator) / 32
    down[last] = torch.randn(hidden, intermediate, generator=generator) / 32
    x = torch.randn(1, hidden, generator=generator).to(BF16)
    pairs, tiles = torch.zeros(1, dtype=torch.int32), torch.tensor([[last, 0, 1, 0]], dtype=torch.int32)
    routing = Routing(torch.full((1, 1), last, dtype=torch.int32), torch.ones(1, 1), pairs, tiles, 16)
    out = ExpertKernels(launcher, shape).apply(x, routing, gate_up, down)
    first = torch.zeros(1, 1, dtype=torch.int64)
    expected = references.experts(x, first, routing.weights, gate_up[last:], down[last:])
    return float((out.double() - expected).abs().max() / expected.abs().max())


def test_experts_beyond_31_bits() -> None:
    assert _far_error(make_launcher(check_races=False)) < TOLERANCE[BF16]


def test_offsets_of_32_bits_are_found() -> None:
    overrides = plant("expert_products.cu", "(int64_t)tile.expert * 2 * width", "tile.expert * 2 * width")
    error = float("inf")
    with contextlib.suppress(PtxError):  # an address that happens to exist gives a wrong result
        error = _far_error(PtxLauncher(check_races=False, overrides=overrides))
    assert error > 2 * TOLERANCE[BF16]


@pytest.mark.parametrize(("tokens", "tile_rows"), [(12, 16), (48, 64), (150, 128)])
def test_what_is_read(tokens: int, tile_rows: int) -> None:
    """Matrices of experts that nobody chose: nothing. Of the others: each byte once for every tile of rows, in whole
    sectors, with no bank conflict on the way into shared memory or out of it."""
    hidden, intermediate, experts = 128, 64, 6
    case = make_case(tokens, BF16, hidden, intermediate, experts, 2, chosen=3)
    launcher = PtxLauncher(check_races=False, collect=True)
    out, routing = case.run(launcher)
    assert case.error(out, routing) < TOLERANCE[BF16]
    assert routing.tile_rows == tile_rows
    used = routing.ids.flatten().bincount(minlength=experts)
    assert used[:3].eq(0).all()
    tiles = int((-(-used // tile_rows)).sum())
    pairs, columns = 2 * tokens, 64 if tile_rows == 16 else 128
    for name, matrix, rows, depth in (
        ("expert_gate_up", 2, 2 * intermediate, hidden),
        ("expert_down", 2, hidden, intermediate),
    ):
        stats = launcher.stats[f"{name}<bf16, {tile_rows}>"]
        assert stats.loaded[matrix] == tiles * rows * depth * 2
        assert stats.loaded[1] == pairs * depth * 2 * -(-rows // columns)
        for text, space in (("cp.async.cg", "global"), ("cp.async.cg", "shared"), ("ldmatrix", "shared")):
            assert all(access.factor == 1.0 for access in stats.matching(text, space)), (name, text)
    router = launcher.stats["router_logits<bf16>"]
    assert router.loaded[2] == -(-tokens // 16) * experts * hidden * 4
    for stats in (router, launcher.stats["combine_experts<bf16>"]):
        assert all(a.factor == 1.0 for a in stats.matching(".v", "global"))  # vectors of 8 and 16 bytes


BUGS = [
    Bug("a wait one group short", "expert_products.cu", "wait<S::STAGES - 2>", "wait<S::STAGES - 1>", IN_FLIGHT),
    Bug("no barrier before a tile is read", "expert_products.cu", "__syncthreads();  // this", "// this", IN_FLIGHT),
    Bug("rows past a tile's end", "expert_products.cu", "r < tile.rows ? pairs", "true ? pairs", "out of bounds"),
    Bug(
        "rows past a tile's end written", "expert_products.cu", "if (row >= tile.rows) continue;\n      T* to = hidden",
        "T* to = hidden", "data race in global|out of bounds",
    ),
    Bug("the wrong half", "expert_products.cu", "*gate = acc[m][n] +", "*gate = acc[m][n + S::NT / 2] +", WRONG),
    Bug("halves of a fragment exchanged", "expert_products.cu", "a[m], b[0], b[1]", "a[m], b[1], b[0]", WRONG),
    Bug("gate and up exchanged", "expert_tiles.cuh", "? column : width + column", "? width + column : column", WRONG),
    Bug("elements past the depth", "expert_tiles.cuh", "&& k + c < depth", "", "out of bounds|wrong"),
    Bug("rows past the matrix", "expert_tiles.cuh", "first + r < end ? first + r : -1", "first + r", "out of bounds"),
    Bug("places instead of pairs", "expert_products.cu", "pairs[tile.first + row] *", "(tile.first + row) *", WRONG),
    Bug("a stage overwritten too early", "expert_products_f32.cu", "__syncthreads();  // all", "//", IN_FLIGHT, F32),
    Bug("a tile not waited for", "expert_products_f32.cu", "cp_async_wait<1>();", "", IN_FLIGHT, F32),
    Bug(
        "counted before the counters are zero", "route_experts.cu", "__syncthreads();  // the ids are here, too", "",
        "data race in|before it is written",
    ),
    Bug("the last rows forgotten", "route_experts.cu", "(rows + tile_rows - 1) / tile_rows", "rows / tile_rows", WRONG),
    Bug("an expert chosen twice", "route_experts.cu", "last.before(other) && ", "", WRONG),
    Bug("another rank's weight", "combine_experts.cu", "weights[pair + rank]", "weights[pair]", WRONG),
]  # fmt: skip


def _error(overrides: dict[str, str], dtype: torch.dtype) -> float:
    """Of tokens that go to three of eight experts: full and partial tiles; no size fits a tile."""
    case = make_case(24, dtype, 136, 40, chosen=3)
    out, routing = case.run(PtxLauncher(overrides=overrides))
    assert routing.tile_rows == 16
    weights, ids = references.route(case.x, case.router, 2, True)
    if not torch.equal(routing.ids.long(), ids):
        return float("inf")
    return max(case.error(out, routing), float((routing.weights - weights).abs().max()))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_planted_bugs_are_found(bug: Bug) -> None:
    assert_found(bug, lambda overrides: _error(overrides, bug.dtype), TOLERANCE[bug.dtype])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_the_same_tokens_without_a_bug(dtype: torch.dtype) -> None:
    assert _error({}, dtype) < TOLERANCE[dtype]


def test_padded_rows_of_a_captured_step_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows in a graph of four: the CPU's logits, and experts are read for three."""
    routings: list[Routing] = []

    def keep(kernels: ExpertKernels, *args: Any) -> Routing:
        routings.append(route(kernels, *args))
        return routings[-1]

    route = ExpertKernels.route
    monkeypatch.setattr(ExpertKernels, "route", keep)
    monkeypatch.setattr(graphs, "graph_sizes", lambda rows: [rows])
    config = dataclasses.replace(MIXTRAL, num_layers=1)
    device = make_device()
    expected, model = cpu_model(config), cuda_model(config, device)
    last_tokens = torch.zeros(4, dtype=torch.int64, device=device.launcher.device)
    assert model.capture_graphs(last_tokens, 4) == 1
    batch = Batch(3, config.vocab_size)
    for new in ([3, 20, 1], [1, 1, 1]):
        metadata = batch.advance([0, 1, 2], new)
        right = expected.forward(torch.from_numpy(metadata.input_ids), metadata)
        logits = model.run(metadata, last_tokens).cpu()
        assert float((logits - right).abs().max() / right.abs().max()) < 1e-5
    captured = [routing for routing in routings if len(routing.ids) == 4][-1]
    ids = captured.ids.cpu()
    assert ids[3].eq(-1).all()
    assert ids[:3].ge(0).all()
    assert captured.tiles[:, 2].sum() == 6


def test_the_bench_counts_and_computes_the_same_as_torch() -> None:
    shape = ExpertShape(BF16, 64, 32, 16, 2, True)
    layer = Layer(make_launcher(), shape, 5)
    out = layer.run()
    ids, weights = layer.routing.ids, layer.routing.weights
    parts = layer.torch_products()()
    expected = torch.zeros(5, 64)
    for place, pair in enumerate(ids.flatten().argsort(stable=True).tolist()):
        expected[pair // 2] += parts[place].float() * weights.flatten()[pair]
    assert float((out - expected).abs().max() / expected.abs().max()) < TOLERANCE[BF16]
    assert layer.used_bytes() == len(set(ids.flatten().tolist())) * 3 * 32 * 64 * 2
    assert layer.flops() == 10 * 3 * 32 * 64 * 2
