"""GPUs that are the ABI fake's, for the length of a module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collective import cuda
from tests.fakes import Fake, compiler, environment

__all__ = ["gpu"]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Fake]:
    """The driver is the fake; whoever comes afterwards finds the machine as it is."""
    if compiler() is None:
        pytest.skip("needs a C compiler, to build tests/fakes")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setattr(cuda, "_devices", {})
        yield Fake()
