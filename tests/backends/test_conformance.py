"""Every transport of this repository passes the public suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from collective import native
from collective.backends.shm import ShmBackend
from collective.contract.world import World
from collective.testing import parametrize_with_checks
from tests.support.conformance_parts import BY_PLACE, BY_SIZE, SHRINKING
from tests.support.loopback import Loopback, Rendezvous

# One rank sends nothing, which one transport shows for all. Eight are more than cores; what default
# algorithms do with so many is shown by algorithms/test_moves.py.
ALONE, SIZES, MANY = (1,), (2, 3), (8,)

Check = Callable[[], None]


@parametrize_with_checks("threads", sizes=ALONE + SIZES)
def test_threads(check: Check) -> None:
    check()


@parametrize_with_checks("threads", sizes=MANY, checks=BY_SIZE)
def test_threads_of_8(check: Check) -> None:
    check()


@parametrize_with_checks("threads", sizes=(4,), checks=SHRINKING)
def test_threads_of_4(check: Check) -> None:
    check()


@parametrize_with_checks("shm", sizes=SIZES)
def test_shm(check: Check) -> None:
    check()


_MESSAGES = (
    "check_send_recv", "check_send_recv_layouts", "check_send_structures", "check_message_order",
    "check_messages_among_collectives", "check_any_source",
)  # fmt: skip


class WithoutTheCore(ShmBackend):
    """``shm`` in Python, whatever has been built."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> WithoutTheCore:
        before = native.chosen.extension is not None
        native.switch(False)
        try:
            return super().connect(world, timeout)
        finally:
            native.switch(before)


# All that the core takes over, and what goes wrong in it.
@parametrize_with_checks(
    WithoutTheCore,
    sizes=(3,),
    checks=[
        name for name in BY_PLACE if any(each in name for each in ("reduce", "bool", "kill", "mis"))
    ]
    + [*_MESSAGES, "check_tags", "check_sendrecv", "check_given_up_message"]
    + ["check_broken_by_a_late_receiver"],
)
def test_shm_without_the_core(check: Check) -> None:
    check()


class WithoutReading(ShmBackend):
    """``shm`` where the system forbids to read another process's memory: long contents are sent."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> WithoutReading:
        options = {**world.options, "shm_single_copy": "off"}
        return super().connect(replace(world, options=options), timeout)


# What reads other ranks' memory elsewhere, and the messages that then carry all.
@parametrize_with_checks(
    WithoutReading,
    sizes=SIZES,
    checks=[
        *(name for name in BY_PLACE if "kill" not in name),
        *_MESSAGES,
        "check_empty_mixed",
    ],
)
def test_shm_without_reading(check: Check) -> None:
    check()


@parametrize_with_checks("shm", sizes=MANY, checks=BY_SIZE)
def test_shm_of_8(check: Check) -> None:
    check()


@parametrize_with_checks(Loopback, sizes=SIZES)
def test_loopback(check: Check) -> None:
    check()


@parametrize_with_checks(Rendezvous, sizes=(3,), checks=BY_SIZE)
def test_sends_that_wait(check: Check) -> None:
    check()
