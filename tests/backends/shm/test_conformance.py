"""The public conformance suite on the transport shm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from collective import native
from collective.backends.shm import ShmBackend
from collective.contract.world import World
from collective.testing import parametrize_with_checks
from tests.support.conformance_parts import BY_PLACE, BY_SIZE, COMPARED

# Eight ranks are more than there are cores.
SIZES, MANY = (2, 3), (8,)

Check = Callable[[], None]


@pytest.mark.quick
@parametrize_with_checks("shm", sizes=SIZES)
def test_shm_passes_suite(check: Check) -> None:
    check()


_MESSAGES = (
    "check_send_recv", "check_send_recv_layouts", "check_send_structures", "check_message_order",
    "check_messages_among_collectives", "check_any_source",
)  # fmt: skip


class WithoutTheCore(ShmBackend):
    """``shm`` in Python, even if the native core is built."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> WithoutTheCore:
        was_native = native.chosen.extension is not None
        native.switch(False)
        try:
            return super().connect(world, timeout)
        finally:
            native.switch(was_native)


# The calls that the native core implements, and the failures inside it.
@parametrize_with_checks(
    WithoutTheCore,
    sizes=(3,),
    checks=[
        name
        for name in BY_PLACE
        if any(each in name for each in ("reduce", "bool", "kill", "mis", "shards"))
    ]
    + [*_MESSAGES, "check_tags", "check_sendrecv", "check_given_up_message"]
    + ["check_broken_by_a_late_receiver"],
)
def test_shm_without_native_core_passes_suite(check: Check) -> None:
    check()


class WithoutReading(ShmBackend):
    """``shm`` on a system that forbids reading another process's memory: long data is sent."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> WithoutReading:
        options = {**world.options, "disable": "shm_single_copy"}
        return super().connect(replace(world, options=options), timeout)


# The calls that otherwise read other ranks' memory. Here messages carry all data, so they are
# tested, too.
@parametrize_with_checks(
    WithoutReading,
    sizes=SIZES,
    checks=[
        *(name for name in BY_PLACE if "kill" not in name),
        *_MESSAGES,
        "check_empty_mixed",
    ],
)
def test_shm_without_single_copy_passes_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("shm", sizes=MANY, checks=BY_SIZE)
def test_shm_of_8_passes_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("shm", sizes=(2,), checks=COMPARED, check="results")
def test_shm_passes_suite_with_compared_results(check: Check) -> None:
    check()


_FOLDS = [name for name in COMPARED if any(each in name for each in ("reduce", "scan", "order"))]


@pytest.mark.whole
@parametrize_with_checks(WithoutTheCore, sizes=(3,), checks=_FOLDS, check="results")
def test_shm_without_native_core_passes_suite_with_compared_results(check: Check) -> None:
    check()
