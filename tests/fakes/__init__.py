"""The ABI fake: functions of NCCL and of the CUDA driver on host memory (see README.md)."""

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
