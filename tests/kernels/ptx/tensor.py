"""ldmatrix and mma.m16n8k16, with the fragment layouts of the PTX manual.

With g = lane / 4 and t = lane % 4, element i of a lane's fragment stands at:

    a (16 x 16): row g (+8 for i in 2, 3, 6, 7), column 2t + i % 2 (+8 for i >= 4)
    b (16 x 8):  row 2t + i % 2 (+8 for i >= 2), column g
    c, d (16 x 8): row g (+8 for i >= 2), column 2t + i % 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.errors import Unsupported
from tests.kernels.ptx.operands import Reader, address, destinations, parts, reader
from tests.kernels.ptx.parse import Instruction, Operand

if TYPE_CHECKING:
    from tests.kernels.ptx.machine import Action, Machine

Array = npt.NDArray[Any]

_G, _T = np.arange(32)[:, None] // 4, np.arange(32)[:, None] % 4
_I8, _I4 = np.arange(8)[None], np.arange(4)[None]
_A_ROW, _A_COLUMN = _G + _I8 // 2 % 2 * 8, _T * 2 + _I8 % 2 + _I8 // 4 * 8  # [32, 8]
_B_ROW, _B_COLUMN = _T * 2 + _I4 % 2 + _I4 // 2 * 8, _G + 0 * _I4  # [32, 4]
_C_ROW, _C_COLUMN = _G + _I4 // 2 * 8, _T * 2 + _I4 % 2  # [32, 4]


def _load_matrix(instruction: Instruction) -> Action:
    """Each of up to four 8x8 matrices of 16-bit elements; lane l names the address of row l % 8 of matrix l / 8."""
    where = instruction.where
    counts = {"x1": 1, "x2": 2, "x4": 4}
    count = next((counts[m] for m in instruction.opcode if m in counts), 0)
    if not count or not {"m8n8", "b16", "shared"} <= set(instruction.opcode):
        raise Unsupported(where)
    names = destinations(instruction.operands[0], where)
    at = address(instruction.operands[1], where)
    transposed = instruction.has("trans")

    def run(machine: Machine) -> None:
        warps = np.flatnonzero(machine.whole_warps(where))
        lanes = (warps[:, None] * 32 + np.arange(8 * count)).ravel()
        rows = machine.shared.load(at(machine)[lanes], lanes, 16, where)
        matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(len(warps), count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 1, 3, 2)
        fragments = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(warps), count, 32)
        for index, name in enumerate(names):
            values = np.zeros((machine.num_lanes // 32, 32), np.uint32)
            values[warps] = fragments[:, index]
            machine.put(name, values.ravel())

    return run


def _halves(kind: str, registers: list[Array]) -> Array:
    """Packed registers [num_lanes] each -> float32 [warps, 32, 2 a register]."""
    packed = np.stack(registers, axis=1)
    if kind == "bf16":
        low, high = packed << np.uint32(16), packed & np.uint32(0xFFFF0000)
        values = np.stack([low, high], axis=2).view(np.float32)
    else:
        values = packed.view(np.uint16).view(np.float16).astype(np.float32)
    return values.reshape(-1, 32, 2 * len(registers))


def _multiply(instruction: Instruction) -> Action:
    where, opcode = instruction.where, instruction.opcode
    kind = opcode[-3]
    if opcode[1:6] != ("sync", "aligned", "m16n8k16", "row", "col") or kind not in ("bf16", "f16"):
        raise Unsupported(where)
    if opcode[6:] != ("f32", kind, kind, "f32"):
        raise Unsupported(where)

    def readers(operand: Operand, dtype: type) -> list[Reader]:
        return [reader(part, dtype, where) for part in parts(operand)]

    to = destinations(instruction.operands[0], where)
    a, b = (readers(operand, np.uint32) for operand in instruction.operands[1:3])
    c = readers(instruction.operands[3], np.float32)

    def run(machine: Machine) -> None:
        machine.whole_warps(where)
        warps = machine.num_lanes // 32
        left = np.empty((warps, 16, 16), np.float32)
        left[:, _A_ROW, _A_COLUMN] = _halves(kind, [source(machine) for source in a])
        right = np.empty((warps, 16, 8), np.float32)
        right[:, _B_ROW, _B_COLUMN] = _halves(kind, [source(machine) for source in b])
        product = (left @ right)[:, _C_ROW, _C_COLUMN].reshape(-1, 4)
        for index, name in enumerate(to):
            machine.put(name, product[:, index] + c[index](machine))

    return run


BUILDERS: dict[str, Callable[[Instruction], Action]] = {"ldmatrix": _load_matrix, "mma": _multiply}
