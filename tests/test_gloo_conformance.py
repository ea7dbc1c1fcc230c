"""The public suite on ``gloo``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collective.testing import parametrize_with_checks

pytest.importorskip("torch", reason="the gloo transport stands on PyTorch")


@parametrize_with_checks("gloo", sizes=(2, 3, 4))
def test_gloo(check: Callable[[], None]) -> None:
    check()
