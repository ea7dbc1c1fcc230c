"""The public conformance suite on the ``gloo`` transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collective.testing import parametrize_with_checks
from tests.support.conformance_parts import BY_SIZE, COMPARED, OF_TWO, all_but

pytest.importorskip("torch", reason="the gloo transport needs PyTorch")


@pytest.mark.whole
@parametrize_with_checks("gloo", sizes=(2,), checks=OF_TWO)
def test_gloo_of_2_passes_suite(check: Callable[[], None]) -> None:
    check()


@parametrize_with_checks("gloo", sizes=(3,), checks=all_but("check_shrink_left"))
def test_gloo_passes_suite(check: Callable[[], None]) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("gloo", sizes=(4,), checks=BY_SIZE)
def test_gloo_of_4_passes_suite(check: Callable[[], None]) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks("gloo", sizes=(3,), checks=COMPARED, check="results")
def test_gloo_passes_suite_with_compared_results(check: Callable[[], None]) -> None:
    check()
