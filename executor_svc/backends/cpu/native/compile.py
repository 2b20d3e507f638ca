"""The compiled forward as machine code on disk: compiled once per CPU type, then loaded in milliseconds.

The key covers this package's sources, the compilers' versions and the CPU's features, so a file is never stale. Where
no cache folder can be written the code is compiled anew at every start, with a warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
import time
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba

from executor_svc.user_cache import user_cache

log = logging.getLogger(__name__)

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_kept: list[llvm.ExecutionEngine] = []  # machine code lives as long as its engine


def has_avx512() -> bool:
    return bool(llvm.get_host_cpu_features().get("avx512f"))


def can_run() -> bool:
    """The kernels count on fused multiply-add and float16 conversion in hardware."""
    features = llvm.get_host_cpu_features()
    return bool((features.get("fma") and features.get("f16c")) or features.get("neon"))


@cache
def load_forward(weights: str, kv_type: str, avx512: bool | None = None) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """``forward(step table address)`` for a weight and a KV type: a ctypes function that releases the interpreter lock.

    ``avx512``: None for what the CPU has; False for AVX2 code on any x86 CPU.
    """
    avx512 = has_avx512() if avx512 is None else avx512
    name = f"forward-{weights}-{kv_type}-{_key(weights, kv_type, avx512)}.bin"
    for folder in _folders():
        code = _read(folder / name)
        if code is not None:
            return _link(*code)
    started = time.perf_counter()
    symbol, machine_code = _compile(weights, kv_type, avx512)
    log.info("compiled the %s forward, KV %s, in %.1f s", weights, kv_type, time.perf_counter() - started)
    if not any(_write(folder / name, symbol, machine_code) for folder in _folders()):
        log.warning("no cache folder can be written: compiled code is not kept (set NUMBA_CACHE_DIR)")
    return _link(symbol, machine_code)


def _folders() -> list[Path]:
    stated, user = os.environ.get("NUMBA_CACHE_DIR"), user_cache()
    return ([Path(stated)] if stated else []) + ([user] if user else [])


def _key(weights: str, kv_type: str, avx512: bool) -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    features = ",".join(sorted(name for name, on in llvm.get_host_cpu_features().items() if on))
    versions = f"{numba.__version__} {llvmlite.__version__} {llvm.get_host_cpu_name()} {features}"
    digest.update(f"{versions} {weights} {kv_type} {avx512}".encode())
    return digest.hexdigest()[:24]


def _compile(weights: str, kv_type: str, avx512: bool) -> tuple[str, bytes]:
    from executor_svc.backends.cpu.native.forward import make_forward

    entry = make_forward(weights, kv_type, avx512)
    machine = _target_machine("haswell" if has_avx512() and not avx512 else "")
    module = llvm.parse_assembly(entry.inspect_llvm())
    return entry.native_name, machine.emit_object(module)


def _target_machine(cpu: str = "") -> llvm.TargetMachine:
    """For a CPU by name, or for this one."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu or llvm.get_host_cpu_name(),
        features="" if cpu else llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )


def _link(symbol: str, machine_code: bytes) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    import numba.core.registry
    from numba.core.runtime import rtsys

    # Both register the few runtime symbols that the code refers to. A symbol that is missing links to address 0.
    rtsys.initialize(numba.core.registry.cpu_target.target_context)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    _kept.append(engine)
    return _ENTRY(engine.get_function_address(symbol))


def _read(path: Path) -> tuple[str, bytes] | None:
    """A file: SHA-256 of the rest, the symbol's name, a newline, machine code. Only this user's own is trusted."""
    try:
        if hasattr(os, "getuid") and path.stat().st_uid not in (os.getuid(), 0):
            return None
        raw = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(raw[32:]).digest() != raw[:32]:
        return None
    symbol, _, machine_code = raw[32:].partition(b"\n")
    return symbol.decode(), machine_code


def _write(path: Path, symbol: str, machine_code: bytes) -> bool:
    body = symbol.encode() + b"\n" + machine_code
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(body).digest() + body)
                file.flush()
                os.replace(file.name, path)  # two processes starting at once write the same bytes
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError:
        return False
    return True
