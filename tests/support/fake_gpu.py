"""Fixture with the GPUs of the ABI fake, for the tests of a module in the tests' own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collective import cuda
from tests.fakes import Fake, compiler, environment

__all__ = ["gpu"]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Fake]:
    """Use the fake as the driver of GPUs; restore the variables and devices after the module."""
    if compiler() is None:
        pytest.skip("needs a C compiler, to build tests/fakes")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setattr(cuda, "_devices", {})
        yield Fake()
