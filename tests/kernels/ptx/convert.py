"""cvt and cvta: between types, and between address spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.memory import SHARED_WINDOW
from tests.kernels.ptx.operands import destination, reader
from tests.kernels.ptx.parse import TYPES, Instruction

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Action, Machine

Array = npt.NDArray[Any]

_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def to_bf16(a: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN becomes the canonical one."""
    bits = a.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), np.uint32(0x7FFF), rounded).astype(np.uint16)


def from_bf16(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(kind: str, a: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return to_bf16(a) if kind == "bf16" else a.astype(np.float16).view(np.uint16)


def _to_integer(a: Array, dtype: type, rounding: Callable[[Array], Array]) -> Array:
    """Saturating; NaN is 0."""
    info = np.iinfo(dtype)
    whole = rounding(a.astype(np.float64))
    inside = np.clip(np.nan_to_num(whole, nan=0.0), float(info.min), np.nextafter(float(info.max) + 1, 0))
    result = inside.astype(dtype)
    return np.where(whole >= float(info.max), dtype(info.max), result)


def _convert(instruction: Instruction) -> Action:
    where, modifiers = instruction.where, instruction.opcode[1:-2]
    to_name, from_name = instruction.opcode[-2:]
    to = destination(instruction.operands[0], where)
    if to_name in ("bf16", "bf16x2", "f16x2") or (to_name == "f16" and from_name == "f32"):
        if modifiers != ("rn",) or from_name != "f32":
            raise Unsupported(where)
        kind = to_name.removesuffix("x2")
        high = reader(instruction.operands[1], np.float32, where)
        if not to_name.endswith("x2"):
            return lambda machine: machine.put(to, _narrow(kind, high(machine)))
        low = reader(instruction.operands[2], np.float32, where)

        def pack(machine: Machine) -> None:
            upper = _narrow(kind, high(machine)).astype(np.uint32) << np.uint32(16)
            machine.put(to, upper | _narrow(kind, low(machine)))

        return pack
    if from_name == "bf16":
        if to_name != "f32":
            raise Unsupported(where)
        bits = reader(instruction.operands[1], np.uint16, where)
        return lambda machine: machine.put(to, from_bf16(bits(machine)))
    dtype = instruction.dtype_of(-2)
    source = reader(instruction.operands[1], TYPES[from_name], where)
    rounding = next((_INTEGRAL[m] for m in modifiers if m in _INTEGRAL), None)
    unknown = [m for m in modifiers if m not in _INTEGRAL and m not in ("rn", "sat")]
    if unknown:
        raise Unsupported(where)
    from_float, to_float = np.dtype(TYPES[from_name]).kind == "f", np.dtype(dtype).kind == "f"
    saturate = "sat" in modifiers
    if saturate and not (to_float and from_float):
        raise Unsupported(where)

    def run(machine: Machine) -> None:
        a = source(machine)
        if from_float and not to_float:
            if rounding is None:
                raise Unsupported(where)
            result = _to_integer(a, dtype, rounding)
        else:
            result = (rounding(a) if rounding is not None else a).astype(dtype)
            if saturate:
                result = np.clip(np.nan_to_num(result, nan=0.0), 0, 1).astype(dtype)
        machine.put(to, result)

    return run


def _convert_address(instruction: Instruction) -> Action:
    to = destination(instruction.operands[0], instruction.where)
    source = reader(instruction.operands[1], np.uint64, instruction.where)
    if not instruction.has("shared"):
        return lambda machine: machine.put(to, source(machine).copy())
    window = np.uint64(SHARED_WINDOW)
    if instruction.has("to"):
        return lambda machine: machine.put(to, source(machine) - window)
    return lambda machine: machine.put(to, source(machine) + window)


BUILDERS: dict[str, Callable[[Instruction], Action]] = {"cvt": _convert, "cvta": _convert_address}
