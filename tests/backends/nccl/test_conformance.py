"""The public suite on ``nccl`` over the ABI fake, with arrays in the memory of its GPUs.

The fake does its work later, as a GPU would. What of its own work the library forgets to order is
seen: outputs are poisoned until they are written.
"""

from __future__ import annotations

from collections.abc import Callable

from collective.testing import parametrize_with_checks
from tests.support.conformance_parts import OF_TWO, all_but
from tests.support.nccl_processes import FakeNccl


class NewNccl(FakeNccl):
    """A library that has all."""

    name = "nccl-fake"
    knobs = {"delay_us": 20, "log": 0}  # noqa: RUF012


class OldNccl(NewNccl):
    """A library without native all_to_all, gather, scatter, split or windows."""

    name = "nccl-fake-2.14"
    version = 21403


# What the old library computes itself; the rest is as with the new one.
OLD = [
    f"check_{name}"
    for name in """
    all_to_all dup empty empty_mixed gather groups_side_by_side mismatch scatter send_recv sendrecv
    split split_by_host
""".split()
]


# How a rank dies is the host plane's affair, and the time of grace the decision's.
LOSSES = [
    *(f"check_shrink_{n}" for n in ("left", "when", "in_the_middle", "without_one_that_is_late")),
    "check_grow_when",
]


@parametrize_with_checks(NewNccl, sizes=(3,), kind="cuda", checks=all_but(*LOSSES))
def test_nccl(check: Callable[[], None]) -> None:
    check()


@parametrize_with_checks(NewNccl, sizes=(2,), kind="cuda", checks=OF_TWO)
def test_nccl_of_2(check: Callable[[], None]) -> None:
    check()


@parametrize_with_checks(OldNccl, sizes=(3,), kind="cuda", checks=OLD)
def test_old_nccl(check: Callable[[], None]) -> None:
    check()
