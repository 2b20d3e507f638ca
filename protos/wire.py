"""Shared pieces of both ZeroMQ contracts: bounded numbers, int arrays as raw little-endian bytes, strict decoding.

Arrays travel as bytes because msgpack spends 5 bytes on most int32 values and Python objects on each of them; a
``bytes`` field costs 4 bytes a value and decodes to a numpy view without a copy.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

LE_INT32 = np.dtype("<i4")
LE_UINT16 = np.dtype("<u2")
LE_FLOAT32 = np.dtype("<f4")

MAX_FRAME_BYTES = 64 * 1024 * 1024  # ZMQ_MAXMSGSIZE on both links: the largest plan is one 1M-token prompt (4 MB)
MAX_NAME = 256

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # MessagePack itself has no integer above 2**64 - 1
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class WireError(ValueError):
    """A frame that is not a message of the contract; the receiver counts it and drops it."""


def pack_int32(values: Any) -> bytes:
    """int sequence or array -> raw little-endian int32 bytes."""
    return np.ascontiguousarray(values, dtype=LE_INT32).tobytes()


def unpack_int32(data: bytes) -> Int32:
    """Raw little-endian int32 bytes -> read-only int32 array (a view). Raises WireError on a broken length."""
    if len(data) % 4:
        raise WireError(f"int32 array of {len(data)} bytes: not a multiple of 4")
    return np.frombuffer(data, dtype=LE_INT32)


class Epoch(msgspec.Struct, array_like=True, frozen=True, order=True):
    """One unbroken order of plans between the core and one executor: the core's incarnation and a counter."""

    incarnation: U64  # random, drawn once by each core process
    counter: U64  # one per Welcome that this core sent
