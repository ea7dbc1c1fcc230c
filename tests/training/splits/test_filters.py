"""Modules and links of which each rank has its own filters alone, against one process's."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import collective
from collective.testing import run_ranks
from tests.support.split_frameworks import CLOSE, far, of, one_thread

__all__ = ["of", "one_thread"]  # fixtures

NAMES = (
    "pairs", "unet", "uneven", "fewer channels than ranks", "groups", "depthwise", "norms",
    "elsewhere",
)  # fmt: skip


def _trained_on_a_rank(
    comm: collective.Communicator, of: ModuleType, name: str, how: Any
) -> dict[str, Any]:
    found: dict[str, Any] = of.trained(*of.split_of(comm, name, **how))
    return found


# -- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_one_process(of: ModuleType, name: str, size: int) -> None:
    expected = of.trained(*of.made(name))
    for found in run_ranks(size, _trained_on_a_rank, of, name, {}):
        assert far(found, expected) < CLOSE


def _trained_in_a_process(comm: collective.Communicator, models: str) -> dict[str, Any]:
    return _trained_on_a_rank(comm, importlib.import_module(models), "pairs", {})


def test_training_is_that_of_one_process_over_shared_memory(of: ModuleType) -> None:
    expected = of.trained(*of.made("pairs"))
    for found in run_ranks(2, _trained_in_a_process, of.__name__, backend="shm"):
        assert far(found, expected) < CLOSE


@pytest.mark.parametrize("how", [{"data": (2,)}, {"batch": 2}], ids=str)
def test_rows_and_samples_are_cut_besides(of: ModuleType, how: dict[str, Any]) -> None:
    expected = of.trained(*of.made("unet"))
    for found in run_ranks(4, _trained_on_a_rank, of, "unet", {"channels": 2, **how}):
        assert far(found, expected) < CLOSE


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
        gradients = [each for each in verification.differences if each.what == "gradient"]
        assert len(gradients) == 1 + 12


@pytest.mark.parametrize("size", [2, 3])
def test_a_state_does_not_depend_on_the_number_of_ranks(
    of: ModuleType, size: int, tmp_path: Path
) -> None:
    expected = of.doubled(tmp_path / "state")
    for found in run_ranks(size, of.loaded, tmp_path / "state"):
        assert far(found, expected) < CLOSE


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["tied", "one bias", "one memory", "not made yet"])
def test_weights_that_cannot_be_cut(of: ModuleType, case: str) -> None:
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
        with pytest.raises(collective.UnsupportedError, match="has this rank's filters alone"):
            of.part(split)(x)

    run_ranks(2, run)


def test_a_rank_s_part_is_not_copied(of: ModuleType) -> None:
    def run(comm: collective.Communicator) -> None:
        split, _ = of.split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match="cannot be copied"):
            of.copied(of.part(split))

    run_ranks(2, run)
