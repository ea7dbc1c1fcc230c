"""The public conformance suite on the transport threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collective.testing import parametrize_with_checks
from tests.support.conformance_parts import BY_SIZE, COMPARED, SHRINKING

# A single rank sends nothing, so one transport is enough for that case. Eight ranks are more than
# there are cores; algorithms/test_moves.py tests the default algorithms with so many ranks.
ALONE, SIZES, MANY = (1,), (2, 3), (8,)

Check = Callable[[], None]


@pytest.mark.quick
@parametrize_with_checks("threads", sizes=ALONE + SIZES)
def test_threads_pass_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("threads", sizes=MANY, checks=BY_SIZE)
def test_threads_of_8_pass_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("threads", sizes=(4,), checks=SHRINKING)
def test_threads_of_4_pass_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("threads", sizes=(3,), checks=COMPARED, check="results")
def test_threads_pass_suite_with_compared_results(check: Check) -> None:
    check()
