"""Kernel signatures: what Python declares, what the compiler's symbol says, and the check of every argument.

A parameter is written as in C++: ``const bf16*``, ``f32*``, ``i32``. A pointer takes a tensor, a value a numpy scalar;
a trailing ``?`` marks a pointer that may be null (``None``). Constness is part of the type: it is compared with the
compiled symbol, and the interpreter refuses writes through it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

_TENSOR_TYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i32": torch.int32,
    "i64": torch.int64,
    "u64": torch.uint64,
}
_VALUE_TYPES: dict[str, type[np.generic]] = {"i32": np.int32, "i64": np.int64, "f32": np.float32, "u64": np.uint64}
_CPP_NAMES = {"f32": "float", "f64": "double", "i32": "int", "i64": "long long", "u64": "unsigned long long"}

Argument = torch.Tensor | np.generic | None


class LaunchError(RuntimeError):
    """A launch that does not fit the kernel's declaration, or a declaration that does not fit the compiled kernel."""


@dataclass(frozen=True, slots=True)
class Parameter:
    type: str  # element type: bf16, f32, i32, ...
    pointer: bool
    const: bool
    nullable: bool

    @property
    def cpp(self) -> str:
        """As the demangler prints it: ``float const*``."""
        name = _CPP_NAMES.get(self.type, self.type)
        return f"{name}{' const' if self.const else ''}{'*' if self.pointer else ''}"


def parse_parameter(text: str, template: dict[str, str]) -> Parameter:
    """``"const T*?"`` with ``{"T": "bf16"}`` -> the parameter; ``ValueError`` for anything unknown."""
    body = text.strip()
    nullable = body.endswith("?")
    body = body.removesuffix("?").strip()
    pointer = body.endswith("*")
    body = body.removesuffix("*").strip()
    const = body.startswith("const ")
    name = body.removeprefix("const ").strip()
    name = template.get(name, name)
    if name not in (_TENSOR_TYPES if pointer else _VALUE_TYPES) or (not pointer and (const or nullable)):
        raise ValueError(f"parameter {text!r} is not supported")
    return Parameter(name, pointer, const, nullable)


def check_arguments(kernel: str, parameters: Sequence[Parameter], arguments: Sequence[Argument], device: str) -> None:
    """Raise ``LaunchError`` unless every argument has exactly the declared type, is contiguous and on ``device``.

    Python numbers are refused: CuPy would pass 8 bytes where the kernel takes 4.
    """
    if len(parameters) != len(arguments):
        raise LaunchError(f"{kernel}: {len(arguments)} arguments for {len(parameters)} parameters")
    for index, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True)):
        wrong = _wrong_tensor(parameter, argument, device) if parameter.pointer else _wrong_value(parameter, argument)
        if wrong is not None:
            raise LaunchError(f"{kernel}: argument {index} ({parameter.cpp}) {wrong}")


def _wrong_value(parameter: Parameter, argument: Any) -> str | None:
    if type(argument) is _VALUE_TYPES[parameter.type]:
        return None
    if not isinstance(argument, np.generic):
        return f"must be a numpy scalar, not {type(argument).__name__}"
    return f"is {argument.dtype}"


def _wrong_tensor(parameter: Parameter, argument: Any, device: str) -> str | None:
    if argument is None:
        return None if parameter.nullable else "must not be null"
    if not isinstance(argument, torch.Tensor):
        return f"must be a tensor, not {type(argument).__name__}"
    if argument.dtype != _TENSOR_TYPES[parameter.type]:
        return f"is {argument.dtype}"
    if argument.is_cuda != (device == "cuda"):
        return f"is on {argument.device}, the kernel runs on {device}"
    return None if argument.is_contiguous() else "is not contiguous"


def check_symbol(kernel: str, parameters: Sequence[Parameter], symbol: str) -> None:
    """Compare the declared parameters with those in the compiled kernel's mangled name."""
    demangled = demangle(symbol)
    inside = demangled[demangled.rindex("(") + 1 : demangled.rindex(")")]
    compiled = [part.strip() for part in inside.split(",")] if inside else []
    declared = [parameter.cpp for parameter in parameters]
    if compiled != declared:
        raise LaunchError(f"{kernel}: declared ({', '.join(declared)}), compiled ({', '.join(compiled)})")


@cache
def demangle(symbol: str) -> str:
    """The C++ declaration of an Itanium-mangled symbol, by the C++ run-time library that torch itself needs."""
    runtime = ctypes.CDLL("libstdc++.so.6")
    libc = ctypes.CDLL(None)
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    status = ctypes.c_int()
    pointer = runtime.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if status.value or not pointer:
        raise LaunchError(f"{symbol!r} is not a mangled C++ name")
    try:
        return ctypes.string_at(pointer).decode()
    finally:
        libc.free(pointer)
