"""Whose splits are tested: fixtures of both frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

__all__ = ["framework", "one_thread"]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Have PyTorch compute in one thread."""
    torch = pytest.importorskip("torch")
    # Two that share a busy core with other programs wait for each other most of the time.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["torch", "chainer"])
def framework(request: pytest.FixtureRequest) -> str:
    """Return the end of the names of modules that have a framework's models."""
    if request.param == "torch":
        request.getfixturevalue("one_thread")
    else:
        pytest.importorskip("collective.adapters.chainer.functional")
    name: str = request.param
    return name
