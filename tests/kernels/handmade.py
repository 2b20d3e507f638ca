"""Small PTX kernels written by hand, run without a compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.machine import Machine, compile_kernel
from tests.kernels.ptx.parse import TYPES, parse_module
from tests.kernels.ptx.stats import Stats

Array = npt.NDArray[Any]


def make_kernel(body: str, parameters: Sequence[str], registers: str = "", shared: str = "") -> str:
    """A module of one kernel ``k``; ``parameters`` are 64-bit pointers."""
    declared = ",\n".join(f".param .u64 {name}" for name in parameters)
    return f"""
.version 9.0
.target sm_90
.address_size 64
.file 1 "/somewhere/hand.cu"
.visible .entry k(
{declared}
)
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<32>;
{registers}
{shared}
{body}
ret;
}}
"""


def run_module(
    text: str,
    arguments: Sequence[Array],
    *,
    constant: Sequence[int] = (),
    grid: int = 1,
    block: int = 32,
    smem: int = 0,
    stats: Stats | None = None,
) -> Machine:
    """Runs ``k``; ``arguments`` are changed in place, those named in ``constant`` may only be read."""
    kernel = parse_module(text)["k"]
    machine = Machine(kernel, compile_kernel(kernel), (grid, 1, 1), (block, 1, 1), smem, stats=stats)
    for index, ((name, _), array) in enumerate(zip(kernel.parameters, arguments, strict=True)):
        base = machine.globals.add(array.view(np.uint8).reshape(-1), index not in constant, index)
        machine.arguments[name] = np.uint64(base)
    machine.run()
    return machine


_REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def evaluate(instruction: str, result: str, **inputs: tuple[str, Sequence[Any]]) -> Array:
    """One instruction on 32 lanes: ``%d`` of type ``result`` from the registers named in ``inputs`` (type, values).

    Values are repeated over the lanes; a type ``pred`` takes booleans.
    """
    names = list(inputs)
    registers, loads, arrays = [f".reg .{_REGISTER[np.dtype(TYPES[result]).itemsize]} %d;"], [], []
    for index, name in enumerate(names):
        kind, values = inputs[name]
        stored = "u32" if kind == "pred" else kind
        with np.errstate(all="ignore"):
            array = np.resize(np.array(values, TYPES[stored]), 32)
        arrays.append(array)
        size = array.itemsize
        target = f"%raw{index}" if kind == "pred" else f"%{name}"
        registers.append(f".reg .{_REGISTER[size]} {target};")
        loads.append(f"ld.param.u64 %rd1, [in{index}];")
        loads.append(f"mad.wide.u32 %rd2, %r1, {size}, %rd1;")
        loads.append(f"ld.global.{'u' + stored[1:] if stored[0] in 'sb' else stored} {target}, [%rd2];")
        if kind == "pred":
            registers.append(f".reg .pred %{name};")
            loads.append(f"setp.ne.u32 %{name}, {target}, 0;")
    out = np.zeros(32, TYPES[result])
    body = "\n".join(
        [
            "mov.u32 %r1, %tid.x;",
            *loads,
            instruction,
            "ld.param.u64 %rd3, [out];",
            f"mad.wide.u32 %rd4, %r1, {out.itemsize}, %rd3;",
            f"st.global.{result} [%rd4], %d;",
        ]
    )
    text = make_kernel(body, [*[f"in{index}" for index in range(len(names))], "out"], "\n".join(registers))
    run_module(text, [*arrays, out], constant=range(len(names)))
    return out
