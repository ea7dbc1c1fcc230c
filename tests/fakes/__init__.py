"""The ABI fake: NCCL's and the CUDA driver's functions over host memory (README.md)."""

from __future__ import annotations

from tests.fakes.arrays import FakeArray, current_stream, set_current_stream
from tests.fakes.build import build, compiler
from tests.fakes.handle import POISON, Fake, environment, library_path

__all__ = [
    "POISON",
    "Fake",
    "FakeArray",
    "build",
    "compiler",
    "current_stream",
    "environment",
    "library_path",
    "set_current_stream",
]
