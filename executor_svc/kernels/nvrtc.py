"""NVRTC, NVIDIA's run-time compiler, through ctypes: no driver, no device and no toolkit needed, only its wheel.

Called directly because CuPy's own path asks a device for the architecture, cannot name ``sm_90a``, and drops the last
byte of the cubin.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PINNED_VERSION = (13, 0)  # a driver of CUDA 13.0 loads what this compiler emits


class NvrtcUnavailable(RuntimeError):
    """The NVRTC library is not installed, or is not the pinned version."""


class NvrtcError(RuntimeError):
    """A compilation failed; the message holds the compiler's log."""


@dataclass(frozen=True, slots=True)
class Compiled:
    image: bytes  # PTX text or a cubin (ELF)
    log: str  # with the register and spill report of ptxas, for cubins
    lowered: dict[str, str]  # name expression -> mangled symbol


def _library_path() -> Path:
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    for root in roots:
        for folder in ("cu13/lib", "cuda_nvrtc/lib"):
            for candidate in sorted(Path(root, folder).glob("libnvrtc.so.13*")):
                return candidate
    raise NvrtcUnavailable("NVRTC 13.0 is not installed (package nvidia-cuda-nvrtc==13.0.*)")


@cache
def _library() -> ctypes.CDLL:
    path = _library_path()
    # NVRTC opens its builtins by bare name: that finds them only if they are loaded already.
    for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    found = _version(library)
    if found != PINNED_VERSION:
        raise NvrtcUnavailable(
            f"NVRTC {found[0]}.{found[1]} is installed, {PINNED_VERSION[0]}.{PINNED_VERSION[1]} is wanted"
            " (package nvidia-cuda-nvrtc==13.0.*)"
        )
    return library


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def version() -> tuple[int, int]:
    """The loaded library's version; ``NvrtcUnavailable`` where there is none or another than the pinned one."""
    return _version(_library())


def compile_source(
    source: str, name: str, headers: dict[str, str], options: list[str], expressions: list[str], want_ptx: bool
) -> Compiled:
    """Compile ``source`` (called ``name`` in messages) with in-memory ``headers`` (include name -> text).

    ``expressions`` are kernel names, template arguments included; each is instantiated and its symbol returned.
    """
    library = _library()

    def check(status: int) -> None:
        if status:
            raise NvrtcError(f"{name}: {library.nvrtcGetErrorString(status).decode()}")

    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(headers))(*[text.encode() for text in headers.values()])
    names = (ctypes.c_char_p * len(headers))(*[key.encode() for key in headers])
    check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), ctypes.c_int(len(headers)), texts, names
        )
    )
    try:
        for expression in expressions:
            check(library.nvrtcAddNameExpression(program, expression.encode()))
        flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = library.nvrtcCompileProgram(program, ctypes.c_int(len(options)), flags)
        log = _fetch(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            raise NvrtcError(f"{name}: {library.nvrtcGetErrorString(status).decode()}\n{log}")
        lowered = {}
        for expression in expressions:
            symbol = ctypes.c_char_p()
            check(library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(symbol)))
            lowered[expression] = (symbol.value or b"").decode()
        image = _fetch(library, program, "PTX").rstrip(b"\0") if want_ptx else _fetch(library, program, "CUBIN")
        return Compiled(image, log, lowered)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """One of NVRTC's size-then-copy results: ``ProgramLog``, ``PTX`` or ``CUBIN``."""
    size = ctypes.c_size_t()
    status = getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    status = status or getattr(library, f"nvrtcGet{what}")(program, buffer)
    if status:
        raise NvrtcError(f"nvrtcGet{what}: {library.nvrtcGetErrorString(status).decode()}")
    return buffer.raw
