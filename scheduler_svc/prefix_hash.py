"""The chained hash by which full blocks of a sequence are found in a prefix cache.

::

    root     = H("stepwire.root",  len|fingerprint, len|salt, block_size)
    hash[0]  = H("stepwire.block", root,    tokens of block 0)
    hash[i]  = H("stepwire.block", hash[i-1], tokens of block i)

The fields of the root are length-prefixed and the two kinds of hash carry different tags (BLAKE2's personalisation),
so a tenant's salt, a fingerprint and a block's content can never stand for one another.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from protos.wire import Int32, pack_int32

HASH_BYTES = 16

_ROOT_TAG = b"stepwire.root"
_BLOCK_STATE = hashlib.blake2b(digest_size=HASH_BYTES, person=b"stepwire.block")
_HASH = np.dtype(f"V{HASH_BYTES}")
_SPLITTERS = [struct.Struct(f"{HASH_BYTES}s" * count).unpack for count in range(64)]  # numpy costs more for a few


def root_hash(fingerprint: str, salt: str, block_size: int) -> bytes:
    """The parent of every first block: 16 bytes that name the model's weights, the tenant and the block size."""
    fingerprint_bytes, salt_bytes = fingerprint.encode(), salt.encode()
    state = hashlib.blake2b(digest_size=HASH_BYTES, person=_ROOT_TAG)
    state.update(struct.pack("<I", len(fingerprint_bytes)) + fingerprint_bytes)
    state.update(struct.pack("<I", len(salt_bytes)) + salt_bytes)
    state.update(struct.pack("<I", block_size))
    return state.digest()


def extend_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of the block whose content is ``tokens`` (raw little-endian int32) and whose predecessor is ``parent``."""
    state = _BLOCK_STATE.copy()  # half the price of a new one
    state.update(parent + tokens)
    return state.digest()


def extend_hashes(hashes: list[bytes], tokens: bytes, block_size: int) -> None:
    """Append the hashes of the full blocks in ``tokens``, which follow the block of the last hash there."""
    width = 4 * block_size
    parent = hashes[-1]
    for at in range(0, len(tokens) - width + 1, width):
        parent = extend_hash(parent, tokens[at : at + width])
        hashes.append(parent)


def split_hashes(hashes: bytes) -> list[bytes]:
    """One after the other, of 16 bytes each."""
    count = len(hashes) // HASH_BYTES
    if count < len(_SPLITTERS):
        return list(_SPLITTERS[count](hashes))
    whole: list[bytes] = np.frombuffer(hashes, dtype=_HASH).tolist()
    return whole


def block_hashes(fingerprint: str, salt: str, tokens: Int32, block_size: int) -> bytes:
    """The hashes of all full blocks of ``tokens``: 16 bytes each, in order, ``len(tokens) // block_size`` of them."""
    hashes = [root_hash(fingerprint, salt, block_size)]
    extend_hashes(hashes, pack_int32(tokens), block_size)
    return b"".join(hashes[1:])
