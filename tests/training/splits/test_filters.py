"""Modules and links whose filters are distributed over the ranks, compared with one process."""

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
    outcome: dict[str, Any] = of.trained(*of.split_of(comm, name, **how))
    return outcome


# -- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_distributed_filters_train_like_one_process(of: ModuleType, name: str, size: int) -> None:
    expected = of.trained(*of.made(name))
    for outcome in run_ranks(size, _trained_on_a_rank, of, name, {}):
        assert far(outcome, expected) < CLOSE


def _trained_in_a_process(comm: collective.Communicator, models: str) -> dict[str, Any]:
    return _trained_on_a_rank(comm, importlib.import_module(models), "pairs", {})


def test_distributed_filters_over_shared_memory_train_like_one_process(of: ModuleType) -> None:
    expected = of.trained(*of.made("pairs"))
    for outcome in run_ranks(2, _trained_in_a_process, of.__name__, backend="shm"):
        assert far(outcome, expected) < CLOSE


@pytest.mark.parametrize("how", [{"data": (2,)}, {"batch": 2}], ids=str)
def test_distributed_filters_combine_with_rows_and_samples(
    of: ModuleType, how: dict[str, Any]
) -> None:
    expected = of.trained(*of.made("unet"))
    for outcome in run_ranks(4, _trained_on_a_rank, of, "unet", {"channels": 2, **how}):
        assert far(outcome, expected) < CLOSE


@pytest.mark.parametrize("size", [2, 4])
def test_distributed_filters_divide_memory_between_ranks(of: ModuleType, size: int) -> None:
    def on_a_rank(comm: collective.Communicator) -> tuple[int, tuple[int, int]]:
        split, x = of.split_of(comm, "pairs")
        return of.bytes_of(split, x), split.memory_report(x).weights

    total = of.bytes_of(*of.made("pairs"))
    # Every rank has the last layer's whole bias, with its gradient and momentum. The other layer
    # whose bias would be replicated has no bias.
    replicated = 3 * 8 * 3
    ranks = run_ranks(size, on_a_rank)
    assert sum(nbytes for nbytes, _ in ranks) == total + (size - 1) * replicated
    largest = max(nbytes for nbytes, _ in ranks)
    # Four ranks share six channels unevenly.
    assert largest < total / size * (1.1 if size == 2 else 1.4)
    for nbytes, weights in ranks:
        assert weights == (total // 3, nbytes // 3)


def test_verify_compares_gradients_of_all_weights(of: ModuleType) -> None:
    def verified(comm: collective.Communicator) -> Any:
        split, x = of.split_of(comm, "unet")
        return split.verify(x)

    for verification in run_ranks(2, verified):
        assert verification
        gradients = [
            difference for difference in verification.differences if difference.what == "gradient"
        ]
        assert len(gradients) == 1 + 12


@pytest.mark.parametrize("size", [2, 3])
def test_distributed_filters_state_is_independent_of_size(
    of: ModuleType, size: int, tmp_path: Path
) -> None:
    expected = of.doubled(tmp_path / "state")
    for outcome in run_ranks(size, of.loaded, tmp_path / "state"):
        assert far(outcome, expected) < CLOSE


# -- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["tied", "one bias", "one memory", "not made yet"])
def test_distributed_filters_of_unsuitable_weights_raise(of: ModuleType, case: str) -> None:
    make, text = of.REFUSED[case]

    def run(comm: collective.Communicator) -> str:
        with pytest.raises(collective.CollectiveError) as caught:
            of.Split(make(), channels=2, comm=comm, filters="own")
        return str(caught.value)

    for message in run_ranks(2, run):
        assert re.search(text, message), message


def test_part_of_distributed_filters_call_raises_unsupported(of: ModuleType) -> None:
    def run(comm: collective.Communicator) -> None:
        split, x = of.split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match="has this rank's filters alone"):
            of.part(split)(x)

    run_ranks(2, run)


def test_part_of_distributed_filters_copy_raises_unsupported(of: ModuleType) -> None:
    def run(comm: collective.Communicator) -> None:
        split, _ = of.split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match="cannot be copied"):
            of.copied(of.part(split))

    run_ranks(2, run)
