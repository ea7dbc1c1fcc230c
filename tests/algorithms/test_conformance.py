"""The public conformance suite on loopback, whose collectives are the algorithms over messages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collective.testing import parametrize_with_checks
from tests.support.conformance_parts import BY_SIZE
from tests.support.loopback import Loopback, Rendezvous

pytestmark = pytest.mark.quick

Check = Callable[[], None]


@parametrize_with_checks(Loopback, sizes=(2, 3))
def test_loopback_passes_suite(check: Check) -> None:
    check()


@parametrize_with_checks(Rendezvous, sizes=(3,), checks=BY_SIZE)
def test_rendezvous_sends_pass_suite(check: Check) -> None:
    check()
