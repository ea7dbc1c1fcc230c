"""Ranks that split one model: their weights are equal, or every rank gets an error."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import collective
from collective.testing import run_ranks
from tests.support.split_frameworks import CLOSE, far, of, one_thread

__all__ = ["of", "one_thread"]  # fixtures

WAYS: list[dict[str, Any]] = [
    {"batch": 2},
    {"channels": 2},
    {"channels": 2, "filters": "own"},
    {"data": (2,)},
]


def _usable(comm: collective.Communicator) -> bool:
    return int(comm.all_reduce(np.ones(1, np.int64))[0]) == comm.size


def _refused(comm: collective.Communicator, make: Any) -> str:
    """Check that ``make`` raises MismatchError and leaves ``comm`` usable; return the text."""
    with pytest.raises(collective.MismatchError) as caught:
        make()
    assert _usable(comm)
    return str(caught.value)


# -- construction of the split ---------------------------------------------------------------


def _differing(comm: collective.Communicator, of: ModuleType, how: dict[str, Any]) -> list[Any]:
    module, x = of.made("batch norm")
    of.disturb(module, comm.rank)
    split = of.Split(module, comm=comm, **how)
    y = of.result(split, x)
    return [y, *of.state_of(split).values()]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_split_of_differing_models_takes_values_of_rank_0(
    of: ModuleType, how: dict[str, Any]
) -> None:
    module, x = of.made("batch norm")
    of.disturb(module, 0)
    expected = [of.result(module, x), *of.state_of(module).values()]
    for outcome in run_ranks(2, _differing, of, how):
        assert far(outcome, expected) < CLOSE


def test_split_without_broadcast_of_differing_values_raises_mismatch(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module, _ = of.made("pairs")
        of.disturb(module, int(comm.rank == 2), of.NAMES[2])
        return _refused(comm, lambda: of.Split(module, data=(3,), comm=comm, broadcast=False))

    for text in run_ranks(3, on_a_rank):
        assert f"the values of {of.NAMES[2]} on rank 2 differ from those on rank 0" in text


def test_split_without_broadcast_accepts_equal_values(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> Any:
        module, x = of.made("pairs")
        return of.result(of.Split(module, data=(2,), comm=comm, broadcast=False), x)

    expected = of.result(*of.made("pairs"))
    for outcome in run_ranks(2, on_a_rank):
        assert far([outcome], [expected]) < CLOSE


@pytest.mark.parametrize("broadcast", [True, False])
def test_split_of_models_with_different_shapes_raises_mismatch(
    of: ModuleType, broadcast: bool
) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module, _ = of.made("pairs" if comm.rank != 1 else "uneven")
        return _refused(comm, lambda: of.Split(module, data=(3,), comm=comm, broadcast=broadcast))

    for text in run_ranks(3, on_a_rank):
        assert f"{of.NAMES[0]} is float64[5, 1, 3, 3] on rank 1" in text
        assert "but float64[6, 1, 3, 3] on rank 0" in text


def test_split_of_models_with_different_dtypes_raises_mismatch(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module = of.single("batch norm") if comm.rank else of.made("batch norm")[0]
        return _refused(comm, lambda: of.Split(module, data=(2,), comm=comm))

    for text in run_ranks(2, on_a_rank):
        assert "float32" in text
        assert "on rank 1" in text


def test_split_with_different_settings_raises_mismatch(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module, _ = of.made("pairs")
        how: Any = {"data": (2,)} if comm.rank else {"channels": 2}
        return _refused(comm, lambda: of.Split(module, comm=comm, **how))

    for text in run_ranks(2, on_a_rank):
        assert "channels is 1 on rank 1, but 2 on rank 0" in text


def _lazy(comm: collective.Communicator, of: ModuleType, broadcast: bool) -> list[Any]:
    split = of.Split(of.lazy(comm.rank), data=(2,), comm=comm, broadcast=broadcast)
    of.result(split, of.made("pairs")[1])
    return [*of.state_of(split).values()]


@pytest.mark.parametrize("broadcast", [True, False])
def test_lazy_parameters_take_values_of_rank_0(of: ModuleType, broadcast: bool) -> None:
    first, second = run_ranks(2, _lazy, of, broadcast)
    assert len(first) == 4
    assert far(second, first) == 0


def test_verify_of_parameters_without_values_raises_invalid_argument(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> None:
        split = of.Split(of.lazy(comm.rank), data=(2,), comm=comm)
        with pytest.raises(collective.InvalidArgumentError, match="has no values yet"):
            split.verify(of.made("pairs")[1])
        assert _usable(comm)

    run_ranks(2, on_a_rank)


# -- changes after construction --------------------------------------------------------------


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_verify_names_differing_parameter(of: ModuleType, how: dict[str, Any]) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module, x = of.made("pairs")
        split = of.Split(module, comm=comm, **how)
        of.disturb(module, comm.rank, of.WHOLE)
        return _refused(comm, lambda: split.verify(x))

    for text in run_ranks(2, on_a_rank):
        assert f"the values of {of.WHOLE} on rank 1 differ from those on rank 0" in text


def test_checked_call_names_first_differing_parameter(
    of: ModuleType,
) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module, x = of.made("pairs")
        split = of.Split(module, data=(2,), comm=comm)
        split(x)
        for name in (of.NAMES[1], of.WHOLE):
            of.disturb(module, comm.rank, name)
        return _refused(comm, lambda: split(x))

    for text in run_ranks(2, on_a_rank, check="always"):
        # Chainer's Split notices it in the message that every call sends.
        assert re.search(
            f"the values of {of.NAMES[1]} (on rank 1 differ from|differ on rank 1)", text
        )


def test_checked_call_compares_ranks_with_same_filters(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        split, x = of.split_of(comm, "pairs", channels=2, data=(2,))
        split(x)
        of.disturb(of.part(split), int(comm.rank == 3), of.NAMES[0])
        return _refused(comm, lambda: split(x))

    for text in run_ranks(4, on_a_rank, check="always"):
        # Ranks 2 and 3 have the second half of the filters.
        assert f"the values of {of.NAMES[0]} on rank 3 differ from those on rank 2" in text


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("name", ["batch norm", "vgg"])
def test_training_leaves_ranks_equal(of: ModuleType, name: str, how: dict[str, Any]) -> None:
    def on_a_rank(comm: collective.Communicator) -> bool:
        module, x = of.made(name)
        of.trained(of.Split(module, comm=comm, **how), x)
        return True

    assert all(run_ranks(2, on_a_rank, check="always"))


# -- inputs ----------------------------------------------------------------------------------


def test_checked_call_with_different_inputs_raises_mismatch(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module, x = of.made("pairs")
        split = of.Split(module, data=(2,), comm=comm)
        return _refused(comm, lambda: split(x + comm.rank))

    for text in run_ranks(2, on_a_rank, check="always"):
        assert "the values of the input on rank 1 differ from those on rank 0" in text


def test_verify_with_different_inputs_raises_mismatch(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module, x = of.made("pairs")
        split = of.Split(module, data=(2,), comm=comm)
        return _refused(comm, lambda: split.verify(x + comm.rank))

    for text in run_ranks(2, on_a_rank):
        assert "the values of the input on rank 1 differ from those on rank 0" in text


def test_checked_call_with_different_arguments_raises_mismatch(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        x = of.inputs(1, 1, 6, 4)
        split = of.Split(of.Scaled(), data=(2,), comm=comm)
        return _refused(comm, lambda: split(x - x, by=x - x + comm.rank))

    for text in run_ranks(2, on_a_rank, check="always"):
        assert "the values of by on rank 1 differ from those on rank 0" in text


def test_checked_call_compares_ranks_with_same_input_piece(of: ModuleType) -> None:
    def on_a_rank(comm: collective.Communicator) -> str:
        module, x = of.made("uneven")
        rows = [slice(5), slice(5, None)][comm.rank % 2]
        split = of.Split(module, channels=2, data=(2,), comm=comm, inputs="pieces")
        piece = x[:, :, rows]
        split(piece)
        return _refused(comm, lambda: split(piece + (comm.rank == 2)))

    for text in run_ranks(4, on_a_rank, check="always"):
        assert "the values of the input on rank 2 differ from those on rank 0" in text
