"""Arrays of GPUs on transports of the CPU: the public suite, and what is particular."""

from __future__ import annotations

from collections.abc import Callable

from on_gpu import StagedShm

from collective.testing import parametrize_with_checks


# Where an array is depends on no number of ranks.
@parametrize_with_checks(StagedShm, sizes=(2,))
def test_staged(check: Callable[[], None]) -> None:
    check()
