"""The public conformance suite on the ``tcp`` transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import pytest

from collective import native
from collective.backends.tcp import TcpBackend
from collective.contract.world import World
from collective.deadline import Deadline
from collective.testing import parametrize_with_checks
from tests.support.conformance_parts import BY_SIZE, COMPARED, OF_TWO, all_but

MOST = all_but("check_shrink_left")


@parametrize_with_checks("tcp", sizes=(2,), checks=OF_TWO)
def test_tcp_of_2_passes_suite(check: Callable[[], None]) -> None:
    check()


@parametrize_with_checks("tcp", sizes=(3,), checks=MOST)
def test_tcp_passes_suite(check: Callable[[], None]) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("tcp", sizes=(5,), checks=BY_SIZE)
def test_tcp_of_5_passes_suite(check: Callable[[], None]) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("tcp", sizes=(3,), checks=COMPARED, check="results")
def test_tcp_passes_suite_with_compared_results(check: Callable[[], None]) -> None:
    check()


class Mixed(TcpBackend):
    """Transport whose odd ranks have no native core."""

    name = "tcp-mixed"

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        if world.rank % 2:
            native.switch(False)
        return super().connect(world, deadline)


class Without(TcpBackend):
    """Transport without the native core."""

    name = "tcp-without"

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        native.switch(False)
        return super().connect(world, deadline)


@parametrize_with_checks(Mixed, sizes=(3,), checks=BY_SIZE)
def test_tcp_of_ranks_with_and_without_core_passes_suite(check: Callable[[], None]) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks(Without, sizes=(3,), checks=MOST)
def test_tcp_without_core_passes_suite(check: Callable[[], None]) -> None:
    check()
