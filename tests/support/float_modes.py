"""Threads with another floating-point mode, as a library built with ``-ffast-math`` makes them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import pytest

__all__ = ["MODES", "float_mode", "needs_float_modes"]

# For each mode: bits of x86-64's MXCSR, and of ARM's FPCR.
MODES = {
    "flushing": (0x8040, 1 << 24),
    "rounding up": (0x4000, 1 << 22),
    "rounding down": (0x2000, 2 << 22),
    "rounding to zero": (0x6000, 3 << 22),
}
# For each processor: the place of the register in fenv_t, and the column of MODES.
_REGISTERS = {"x86_64": (28, 0), "aarch64": (0, 1)}
_BYTES = 128  # of fenv_t, at most

needs_float_modes = pytest.mark.skipif(
    os.uname().machine not in _REGISTERS or not hasattr(ctypes.CDLL(None), "fesetenv"),
    reason="the C library cannot set the floating-point mode",
)


@contextlib.contextmanager
def float_mode(name: str) -> Iterator[None]:
    """Compute in a mode in this thread; check that the body has not changed the mode."""
    library = ctypes.CDLL(None)
    before, inside = (ctypes.create_string_buffer(_BYTES) for _ in range(2))
    library.fegetenv(before)
    at, column = _REGISTERS[os.uname().machine]
    changed = ctypes.create_string_buffer(before.raw, _BYTES)
    word = ctypes.c_uint32.from_buffer(changed, at)
    word.value |= MODES[name][column]
    library.fesetenv(changed)
    try:
        yield
        library.fegetenv(inside)
    finally:
        library.fesetenv(before)
    control = ctypes.c_uint32.from_buffer(inside, at).value
    exceptions = 0x3F if column == 0 else 0  # flags, which arithmetic sets
    assert control & ~exceptions == word.value & ~exceptions, "the body has changed the mode"
