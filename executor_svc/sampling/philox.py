"""Philox4x32-10, a counter-based generator: random bits as a pure function of a key and a counter, with no state.

After J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: UInt64, key: UInt64) -> UInt64:
    """counter [4, N] and key [2, N], 32-bit words in uint64 -> [4, N] random 32-bit words in uint64."""
    even = counter[0::2]  # words 0 and 2: multiplied
    odd = counter[1::2]  # words 1 and 3: mixed in
    keys = key.copy()
    for _ in range(ROUNDS):
        product = even * _MULTIPLIERS  # 32 x 32 bits: exact in 64
        even, odd = (product[::-1] >> _32) ^ odd ^ keys, product[::-1] & _LOW
        keys = (keys + _WEYL) & _LOW
    words = np.empty_like(counter)
    words[0::2] = even
    words[1::2] = odd
    return words


DRAW_VERSION = 1  # of the whole drawing function (draw.py): part of the counter, so versions never share bits


def draw_bits(seed: UInt64, choice: UInt64, position: UInt64) -> UInt64:
    """64 random bits for output number ``position`` of choice ``choice`` of a request seeded with ``seed``; all [N]."""
    counter = np.zeros((4, len(seed)), dtype=np.uint64)
    counter[0] = position & _LOW
    counter[1] = choice & _LOW
    counter[2] = DRAW_VERSION
    key = np.stack((seed & _LOW, seed >> _32))
    words = philox4x32(counter, key)
    bits: UInt64 = words[0] | (words[1] << _32)
    return bits
