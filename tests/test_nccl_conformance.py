"""The public suite on ``nccl`` over the ABI fake."""

from __future__ import annotations

from collections.abc import Callable

from fake_nccl import FakeNccl, OldNccl

from collective.testing import parametrize_with_checks


@parametrize_with_checks(FakeNccl, sizes=(2, 3, 4))
def test_nccl(check: Callable[[], None]) -> None:
    check()


@parametrize_with_checks(OldNccl, sizes=(3,))
def test_old_nccl(check: Callable[[], None]) -> None:
    check()
