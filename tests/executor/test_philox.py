"""Philox4x32-10 against the published known answers."""

from __future__ import annotations

import numpy as np
import pytest

from executor_svc.sampling.philox import draw_bits, philox4x32

KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)[:, None]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox4x32(words(counter), words(key))[:, 0].tolist() == expected


def test_rows_do_not_depend_on_each_other() -> None:
    counter = np.hstack([words(counter) for counter, _, _ in KNOWN])
    key = np.hstack([words(key) for _, key, _ in KNOWN])
    assert philox4x32(counter, key).T.tolist() == [expected for _, _, expected in KNOWN]


def test_bits_change_with_seed_choice_and_position() -> None:
    def bits(seed: int, choice: int, position: int) -> int:
        return int(draw_bits(*(np.array([x], dtype=np.uint64) for x in (seed, choice, position)))[0])

    keys = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (2**64 - 1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 2**31 - 1, 2**31 - 1)]
    assert len({bits(*key) for key in keys}) == len(keys)
    assert bits(5, 2, 9) == 0xF17A02FF16D76B1A  # part of the drawing contract: a change is a new DRAW_VERSION
