"""Every family's logits equal those of ``transformers``, and have the same bits however they are batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.backends.cpu.exact import exact_tanh
from executor_svc.backends.cpu.experts import route
from executor_svc.backends.cpu.native.supported import reason_against
from executor_svc.backends.cpu.torch_ops import TorchOps
from executor_svc.weights.checkpoint import open_checkpoint
from tests.executor.model.batch import Sequence, run
from tests.executor.model.families import ATTENTION, CASES, TOLERANCE, WINDOW, random_ids, reference_logits

LENGTH = 130


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: case.make(root / name) for name, case in CASES.items()}


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(folders: dict[str, Path], load: Any, name: str, attention: str) -> None:
    """A whole prefill against the reference; then a row in chunks and decode steps beside rows of other lengths, bit
    for bit against the prefill."""
    folder = folders[name]
    reason = reason_against(open_checkpoint(folder).config) if attention == "numba" else None
    if reason is not None:
        pytest.skip(reason)
    model = load(folder, "float32", attention)
    ids = random_ids(LENGTH, seed=1)
    whole = Sequence(ids, list(range(20, 29)))
    run(model, [(whole, LENGTH)], 16)
    expected = reference_logits(folder, ids)
    torch.testing.assert_close(whole.logits[0], expected, atol=TOLERANCE, rtol=0)

    row = Sequence(ids, list(reversed(range(30, 39))))  # pages need not be in order
    mates = [Sequence(random_ids(80, seed=2 + i), list(range(40 + 6 * i, 46 + 6 * i))) for i in range(2)]
    for mate, count in zip(mates, (5, 66), strict=True):
        run(model, [(mate, count)], 16)
    for count in (7, 64, 1, 40, *[1] * 3, 15):
        decoding = [(mate, 1) for mate in mates]
        run(model, [(row, 1), *decoding] if count == 1 else [decoding[0], (row, count), decoding[1]], 16)
    assert torch.equal(torch.cat(row.logits), whole.logits[0][: row.length])


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, case in CASES.items() for what in case.without])
def test_differences_make_a_difference(folders: dict[str, Path], name: str, what: str) -> None:
    """The tests above would fail if a window, a cap or a scale were ignored: without it the reference differs."""
    ids = random_ids(LENGTH, seed=1)
    usual = reference_logits(folders[name], ids)
    without = reference_logits(folders[name], ids, **CASES[name].without[what])
    assert float((usual - without).abs().max()) > 100 * TOLERANCE


@pytest.mark.parametrize("attention", ATTENTION)
def test_pages_outside_of_the_window_are_not_read(folders: dict[str, Path], load: Any, attention: str) -> None:
    """Where every layer has the window, what lies before it may be anything."""
    model = load(folders["mistral-window"], "float32", attention)
    ids = random_ids(LENGTH, seed=5)
    sound, row = Sequence(ids, list(range(20, 29))), Sequence(ids, list(range(30, 39)))
    run(model, [(sound, 120), (row, 120)], 16)
    for tensor in model.kv_tensors():  # 256 blocks of 16 tokens are the leading axis, or all of it
        tensor.view(256, -1)[row.blocks[: (120 - WINDOW) // 16]] = float("nan")
    run(model, [(sound, 1), (row, 1)], 16)
    run(model, [(sound, 9), (row, 9)], 16)
    assert all(torch.equal(a, b) for a, b in zip(sound.logits[1:], row.logits[1:], strict=True))


def test_exact_functions(folders: dict[str, Path]) -> None:
    """Within a few units in the last place of float64's values, and the same bits wherever an element stands."""
    x = torch.cat([torch.linspace(-20, 20, 40001), torch.tensor([0.35, -0.35, 1e-20, -0.0])])
    assert float(((exact_tanh(x).double() - x.double().tanh()) / x.double().tanh()).abs().nan_to_num().max()) < 5e-7
    assert torch.equal(exact_tanh(x[7:]), exact_tanh(x)[7:])
    assert exact_tanh(torch.tensor([float("nan")])).isnan().all()
    assert torch.equal(exact_tanh(torch.tensor([200.0, -200.0])), torch.tensor([1.0, -1.0]))
    ops = TorchOps(open_checkpoint(folders["gemma2"]).config, torch.zeros(1, 32))
    gate_up = torch.cat([x, torch.full_like(x, 2.0)])[None]
    expected = 2.0 * torch.nn.functional.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close(ops.gelu_tanh_mul(gate_up)[0].double(), expected, atol=1e-6, rtol=1e-5)


def test_routing() -> None:
    """Softmax over all experts, the likeliest by rank, ties to the lower id; a row's choice is its own."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [float("nan"), 1.0, 1.0, 1.0]])
    weights, ids = route(logits, 2, normalize=True)
    assert ids[:2].tolist() == [[1, 2], [0, 1]]
    assert torch.equal(weights[:2], torch.full((2, 2), 0.5))
    assert weights[2].isnan().all()
    plain, _ = route(logits, 3, normalize=False)
    torch.testing.assert_close(plain[0], logits[0].softmax(dim=-1)[[1, 2, 3]])
