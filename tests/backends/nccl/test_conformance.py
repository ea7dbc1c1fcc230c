"""The public conformance suite on ``nccl`` over the ABI fake, with arrays in GPU memory.

The fake does its work later, as a GPU would, and outputs are poisoned until they are written. So a
test sees if the library forgets to order some of its own work.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collective.testing import parametrize_with_checks
from tests.support.conformance_parts import OF_TWO, all_but
from tests.support.nccl_processes import FakeNccl


class NewNccl(FakeNccl):
    """Transport with a library that has all functions."""

    name = "nccl-fake"
    knobs = {"delay_us": 20, "log": 0}  # noqa: RUF012


class OldNccl(NewNccl):
    """Transport with a library without windows."""

    name = "nccl-fake-2.19"
    version = 21903


# Checks of the calls that work differently with the old library; the others are the same.
OLD = [f"check_{name}" for name in ("dup", "empty", "empty_mixed", "split")]


# The host plane handles the death of a rank, and the shrink decision has the grace period: neither
# depends on NCCL.
LOSSES = [
    *(f"check_shrink_{n}" for n in ("left", "when", "in_the_middle", "without_one_that_is_late")),
    "check_grow_when",
]


@parametrize_with_checks(NewNccl, sizes=(3,), kind="cuda", checks=all_but(*LOSSES))
def test_nccl_passes_suite(check: Callable[[], None]) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks(NewNccl, sizes=(2,), kind="cuda", checks=OF_TWO)
def test_nccl_of_2_passes_suite(check: Callable[[], None]) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks(OldNccl, sizes=(3,), kind="cuda", checks=OLD)
def test_old_nccl_passes_suite(check: Callable[[], None]) -> None:
    check()
