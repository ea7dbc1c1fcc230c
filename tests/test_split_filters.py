"""Modules and links of which each rank has its own filters alone, against one process's."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import collective
from collective.testing import run_ranks
from tests.split_frameworks import framework, one_thread

__all__ = ["framework", "one_thread"]  # fixtures

CLOSE = 1e-12
NAMES = (
    "pairs", "unet", "uneven", "fewer channels than ranks", "groups", "depthwise", "norms",
    "elsewhere",
)  # fmt: skip


def models(name: str) -> ModuleType:
    return importlib.import_module(f"tests.split_filters_{name}")


@pytest.fixture
def of(framework: str) -> ModuleType:
    """Return a framework's models."""
    return models(framework)


def far(of: ModuleType, found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference, relative to the largest element of its array."""
    pairs = {name: (of.numpy_of(found[name]), of.numpy_of(expected[name])) for name in expected}
    assert {name: each.shape for name, each in found.items()} == {
        name: each.shape for name, each in expected.items()
    }
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in pairs.values())


def _trained_on_a_rank(
    comm: collective.Communicator, framework: str, name: str, how: Any
) -> dict[str, Any]:
    of = models(framework)
    return of.trained(*of.split_of(comm, name, **how))


# -- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_one_process(
    of: ModuleType, framework: str, name: str, size: int
) -> None:
    expected = of.trained(*of.made(name))
    for found in run_ranks(size, _trained_on_a_rank, framework, name, {}):
        assert far(of, found, expected) < CLOSE


def test_training_is_that_of_one_process_over_shared_memory(of: ModuleType, framework: str) -> None:
    expected = of.trained(*of.made("pairs"))
    for found in run_ranks(2, _trained_on_a_rank, framework, "pairs", {}, backend="shm"):
        assert far(of, found, expected) < CLOSE


@pytest.mark.parametrize("how", [{"data": (2,)}, {"batch": 2}], ids=str)
def test_rows_and_samples_are_cut_besides(
    of: ModuleType, framework: str, how: dict[str, Any]
) -> None:
    expected = of.trained(*of.made("unet"))
    how = {"channels": 2, **how}
    for found in run_ranks(4, _trained_on_a_rank, framework, "unet", how):
        assert far(of, found, expected) < CLOSE


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_has_its_part_of_weights_gradients_and_momentum(of: ModuleType, size: int) -> None:
    def on_a_rank(comm: collective.Communicator) -> tuple[int, tuple[int, int]]:
        split, x = of.split_of(comm, "pairs")
        return of.bytes_of(split, x), split.memory_report(x).weights

    whole = of.bytes_of(*of.made("pairs"))
    replicated = 3 * 8 * 3  # the last bias, with gradient and momentum; the other row has none
    ranks = run_ranks(size, on_a_rank)
    assert sum(each for each, _ in ranks) == whole + (size - 1) * replicated
    largest = max(each for each, _ in ranks)
    assert largest < whole / size * (1.1 if size == 2 else 1.4)  # six channels over four ranks
    for each, weights in ranks:
        assert weights == (whole // 3, each // 3)


def test_verify_compares_gradients_of_all_weights(of: ModuleType) -> None:
    def verified(comm: collective.Communicator) -> Any:
        split, x = of.split_of(comm, "unet")
        return split.verify(x)

    for verification in run_ranks(2, verified):
        assert verification
        assert len(verification.differences) == 6 + 1 + 12


@pytest.mark.parametrize("size", [2, 3])
def test_a_state_does_not_depend_on_the_number_of_ranks(
    of: ModuleType, size: int, tmp_path: Path
) -> None:
    expected, state = of.doubled(tmp_path / "state")
    for y, found in run_ranks(size, of.loaded, tmp_path / "state"):
        assert far(of, {"y": y}, {"y": expected}) < CLOSE
        for name, each in state.items():
            np.testing.assert_array_equal(of.numpy_of(found[name]), of.numpy_of(each))


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("torch", case) for case in ("tied", "one bias", "one memory", "not made yet")),
        *(("chainer", case) for case in ("tied", "one bias", "one array", "not made yet")),
    ],
)
def test_weights_that_cannot_be_cut(name: str, case: str) -> None:
    adapter = "chainer.functional" if name == "chainer" else "torch"
    pytest.importorskip(f"collective.adapters.{adapter}")
    of = models(name)
    make, text = of.REFUSED[case]

    def run(comm: collective.Communicator) -> str:
        with pytest.raises(collective.CollectiveError) as caught:
            of.Split(make(), channels=2, comm=comm, filters="own")
        return str(caught.value)

    for found in run_ranks(2, run):
        assert re.search(text, found), found


def test_a_rank_s_part_is_not_computed_by_itself(of: ModuleType) -> None:
    def run(comm: collective.Communicator) -> None:
        split, x = of.split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match=of.ALONE):
            of.part(split)(x)

    run_ranks(2, run)


def test_a_rank_s_part_is_not_copied(of: ModuleType) -> None:
    def run(comm: collective.Communicator) -> None:
        split, _ = of.split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match="cannot be copied"):
            of.copied(of.part(split))

    run_ranks(2, run)
