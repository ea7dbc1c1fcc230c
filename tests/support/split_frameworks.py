"""Whose splits are tested: fixtures of both frameworks, and how far a result is from another."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

__all__ = ["CLOSE", "far", "of", "one_thread"]

CLOSE = 1e-12


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
def of(request: pytest.FixtureRequest) -> ModuleType:
    """Return a framework's models."""
    if request.param == "torch":
        request.getfixturevalue("one_thread")
    else:
        pytest.importorskip("collective.adapters.chainer.functional")
    return importlib.import_module(f"tests.support.split_models_{request.param}")


def far(found: Any, expected: Any) -> float:
    """Return the largest difference of arrays, relative to the elements of the array.

    Where an array is next to zero (the gradient of what a normalisation takes out), relative to
    a hundredth of the largest of all.

    Args:
        found, expected: lists of arrays, or dicts of arrays by name.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [found[name] for name in expected], list(expected.values())
    assert [a.shape for a in found] == [b.shape for b in expected]
    pairs = [(a, b) for a, b in zip(found, expected) if b.size]
    most = max(float(np.abs(b).max()) for _, b in pairs)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), most / 100)) for a, b in pairs)
