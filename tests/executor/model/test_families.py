"""Every family's logits equal those of ``transformers``, and have the same bits however they are batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.backends.cpu.native.supported import reason_against
from executor_svc.weights.checkpoint import open_checkpoint
from tests.executor.model.batch import Sequence, run
from tests.executor.model.families import ATTENTION, CASES, TOLERANCE, random_ids, reference_logits

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
