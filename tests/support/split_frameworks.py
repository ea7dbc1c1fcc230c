"""Fixtures for tests of splits in both frameworks, and the distance between results.

A test of splits takes the fixture :func:`of`, and compares results with :func:`far` and CLOSE.
"""

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
    """Limit PyTorch to one thread."""
    torch = pytest.importorskip("torch")
    # Two threads on a core that other programs use wait for each other most of the time.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["torch", "chainer"])
def of(request: pytest.FixtureRequest) -> ModuleType:
    """Return the module with a framework's models."""
    if request.param == "torch":
        request.getfixturevalue("one_thread")
    else:
        pytest.importorskip("collective.adapters.chainer.functional")
    return importlib.import_module(f"tests.support.split_models_{request.param}")


def far(found: Any, expected: Any) -> float:
    """Return the largest difference of arrays, relative to the largest element of each array.

    If an array is nearly zero, as the gradient of a value that a normalisation removes, the
    difference is relative to a hundredth of the largest element of all arrays.

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
