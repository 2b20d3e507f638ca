"""How many memory blocks Python asks for: the interpreter's allocator, wrapped with a counter in compiled code.

Counts allocations of Python objects and their parts (the ``obj`` and ``mem`` domains), not numpy's array data.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np

_DOMAINS = (1, 2)  # PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ


class _Allocator(ctypes.Structure):
    """PyMemAllocatorEx."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("malloc", ctypes.c_void_p),
        ("calloc", ctypes.c_void_p),
        ("realloc", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
    )


class AllocationCounter:
    """Counts while it is entered: ``with counter: ...``, as often as wanted."""

    def __init__(self) -> None:
        self._count = np.zeros(1, dtype=np.int64)
        self._originals = []
        self._counting = []
        for domain in _DOMAINS:
            original = _Allocator()
            ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(original))
            malloc, calloc = _wrapped(original)
            self._originals.append((domain, original, malloc, calloc))
            # The interpreter's own allocators take no notice of the context: it carries the counter.
            counting = _Allocator(
                self._count.ctypes.data, malloc.address, calloc.address, original.realloc, original.free
            )
            self._counting.append((domain, counting))

    @property
    def total(self) -> int:
        return int(self._count[0])

    def __enter__(self) -> None:
        for domain, counting in self._counting:
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(counting))

    def __exit__(self, *error: object) -> None:
        for domain, original, _, _ in self._originals:
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(original))


def _wrapped(original: _Allocator) -> tuple[Any, Any]:
    """(malloc, calloc) of ``original`` that also add one to the int64 that their context points to."""
    real_malloc = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)(original.malloc)
    real_calloc = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)(original.calloc)

    @numba.cfunc("uintp(voidptr, uintp)")
    def malloc(context, size):  # type: ignore[no-untyped-def]
        numba.carray(context, 1, np.int64)[0] += 1
        return real_malloc(context, size)

    @numba.cfunc("uintp(voidptr, uintp, uintp)")
    def calloc(context, number, size):  # type: ignore[no-untyped-def]
        numba.carray(context, 1, np.int64)[0] += 1
        return real_calloc(context, number, size)

    return malloc, calloc
