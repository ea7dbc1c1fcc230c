"""PyTorch modules computed in pieces, sequentially and over ranks.

training/splits/test_cuts.py has the tests that all frameworks share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import collective  # noqa: E402
from collective.adapters.torch import DistributedDataParallel, Split  # noqa: E402
from collective.testing import run_ranks  # noqa: E402
from tests.support.split_frameworks import CLOSE, far, one_thread  # noqa: E402
from tests.support.split_models_torch import STEPS, disturb, made, outcome, split_of, state_of  # noqa: E402

__all__ = ["one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


# -- pieces computed sequentially ------------------------------------------------------------


def test_split_channel_dropout_equals_module() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.4), nn.Conv2d(4, 1, 3)).double()
    x = torch.randn(2, 1, 12, 9, dtype=torch.float64)
    for how in ({"data": (3,)}, {"channels": 2}, {"batch": 2}):
        torch.manual_seed(3)
        expected = outcome(model, x, model)
        torch.manual_seed(3)
        assert far(outcome(model, x, Split(model, **how)), expected) < CLOSE, how


# -- over ranks ------------------------------------------------------------------------------


def _normalised(comm: collective.Communicator, x: Any) -> Any:
    return Split(nn.BatchNorm2d(4), data=(comm.size,), comm=comm)(x).detach()


@pytest.mark.parametrize("size", [1, 2])
def test_split_half_precision_sums_use_single_precision(size: int) -> None:
    x = (torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0)) + 10).half()
    # The sum over a channel overflows half precision.
    expected = nn.BatchNorm2d(4)(x.float()).detach().half()
    if size == 1:
        outputs = [Split(nn.BatchNorm2d(4), data=(4,))(x).detach()]
    else:
        outputs = run_ranks(size, _normalised, x)
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=0, atol=2e-3)


# -- errors ----------------------------------------------------------------------------------


def test_split_with_pieces_unequal_to_ranks_raises() -> None:
    def run(comm: collective.Communicator) -> None:
        with pytest.raises(
            collective.InvalidArgumentError,
            match=r"4 pieces \(expected one piece for each of the 2",
        ):
            Split(nn.Conv2d(1, 1, 3), data=(2, 2), comm=comm)

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Sequential(Split(nn.Conv2d(1, 1, 3))), "0 is a Split.*in one call"),
        (nn.Sequential(nn.SyncBatchNorm(3)), "0 is a SyncBatchNorm.*BatchNorm that it replaces"),
        (nn.parallel.DataParallel(nn.Sequential(nn.ReLU())), "wrap the Split instead"),
    ],
    ids=["split", "norm", "replicated"],
)
def test_split_of_unsupported_module_raises(module: nn.Module, text: str) -> None:
    with pytest.raises(collective.UnsupportedError, match=text):
        Split(module, data=(2,))


def test_split_of_missing_data_axes_raises_shape_error() -> None:
    with pytest.raises(
        collective.ShapeError, match=r"data=\(2, 2\), but the input has 1 data axes"
    ):
        Split(nn.Conv1d(1, 1, 3), data=(2, 2))(torch.ones(1, 1, 8))


# -- memory reports --------------------------------------------------------------------------


def test_memory_report_counts_kept_activations() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    x = torch.randn(1, 1, 32, 32)
    report = Split(model, data=(4,)).memory_report(x)
    assert report.whole == {"1 (ReLU)": 8 * 30 * 30 * 4, "3 (ReLU)": 8 * 28 * 28 * 4}
    assert report.split == {}
    assert report.piece == 8 * 9 * 30 * 4 + 8 * 7 * 28 * 4  # with the two rows of overlap
    assert report.ratio == report.piece / sum(report.whole.values())


def test_memory_report_counts_channel_piece_within_data_piece() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3), nn.ReLU())
    report = Split(model, data=(2,), channels=4).memory_report(torch.randn(1, 1, 32, 32))
    # A piece has two of the eight channels with 16 rows, and the result of the last convolution.
    assert report.piece == 2 * 16 * 30 * 4 + 2 * 14 * 28 * 4


def test_memory_report_without_recompute_counts_all_pieces() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    report = Split(model, data=(2,), recompute=False).memory_report(torch.randn(1, 1, 32, 32))
    assert report.piece == 0
    assert sum(report.split.values()) == 2 * 8 * 16 * 30 * 4


def test_split_exposes_parameters_of_module() -> None:
    module, _ = made("unet")
    split = Split(module, data=(2,))
    assert {f"module.{name}" for name in module.state_dict()} == set(split.state_dict())
    assert all(a is b for a, b in zip(split.parameters(), module.parameters(), strict=True))


# -- with data-parallel training -------------------------------------------------------------


def _within_data_parallel(
    comm: collective.Communicator, how: dict[str, Any]
) -> dict[str, np.ndarray[Any, Any]]:
    pieces, samples = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    module, x = made("pairs")
    split = Split(module, comm=pieces, **how)
    _train(DistributedDataParallel(split, samples), x[comm.rank // 2 :][:1])
    return state_of(split)


def _train(model: nn.Module, x: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("how", [{"data": (2,)}, {"channels": 2, "filters": "own"}], ids=str)
def test_split_within_data_parallel_equals_module(how: dict[str, Any]) -> None:
    module, x = made("pairs")
    _train(module, x)
    for state in run_ranks(4, _within_data_parallel, how):
        assert far(state, state_of(module)) < CLOSE


def _replicas(comm: collective.Communicator) -> dict[str, np.ndarray[Any, Any]]:
    pieces, samples = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    module, _ = made("pairs")
    disturb(module, comm.rank)
    split = Split(module, data=(2,), comm=pieces)
    DistributedDataParallel(split, samples)
    return state_of(split)


def test_data_parallel_of_splits_starts_from_weights_of_rank_0() -> None:
    for state in run_ranks(4, _replicas):
        assert far(state, state_of(made("pairs")[0])) == 0


# -- parameters and buffers shared by the ranks ----------------------------------------------


class Mixed(nn.Module):
    """A module with tensors of several dtypes: one is frozen, one shared, one not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3).bfloat16()
        self.third = nn.Conv2d(1, 1, 3)
        self.third.weight = self.first.weight
        self.third.bias = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool), persistent=False)
        self.register_buffer("strided", torch.zeros(4, 3).t())

    def forward(self, x: Any) -> Any:
        return self.third(self.second(self.first(x).bfloat16()).float())


def _mixed(comm: collective.Communicator) -> list[Any]:
    module = Mixed()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(comm.rank + 1 if tensor.dtype != torch.bool else comm.rank == 1)
    split = Split(module, data=(2,), comm=comm)
    split(torch.ones(1, 1, 12, 9)).sum().backward()
    return [tensor.detach().clone() for tensor in (*split.parameters(), *split.buffers())]


def test_split_broadcasts_tensors_of_all_dtypes_from_rank_0() -> None:
    for tensors in run_ranks(2, _mixed, check="always"):
        assert len(tensors) == 5 + 3
        for tensor in tensors:
            assert (tensor == (tensor.dtype != torch.bool)).all()


def test_split_with_parameter_frozen_on_one_rank_raises() -> None:
    def run(comm: collective.Communicator) -> None:
        module = nn.Conv2d(1, 1, 3)
        module.bias.requires_grad_(comm.rank == 0)
        with pytest.raises(
            collective.MismatchError,
            match="bias is not trained on rank 1, but trained on rank 0",
        ):
            Split(module, data=(2,), comm=comm)

    run_ranks(2, run)


# -- channels, and filters that differ between ranks -----------------------------------------


def _middle_axis(comm: collective.Communicator, module: nn.Module, x: Any) -> list[Any]:
    module = copy.deepcopy(module)
    Split(module, channels=2, comm=comm)(x).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def test_split_linear_on_channel_rows_has_whole_gradient() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Linear(6, 5), nn.Conv1d(4, 2, 1)).double()
    x = torch.randn(2, 1, 8, dtype=torch.float64)
    for gradients in run_ranks(2, _middle_axis, module, x):
        module.zero_grad()
        module(x).square().sum().backward()
        for gradient, parameter in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)


def _loaded_pieces(comm: collective.Communicator) -> str:
    split, _ = split_of(comm, "pairs")
    pieces = {name: parameter.detach() for name, parameter in split.named_parameters()}
    with pytest.raises(collective.ShapeError) as caught:
        split.load_state_dict(pieces)
    return str(caught.value)


def test_split_load_state_dict_of_pieces_raises_shape_error() -> None:
    for text in run_ranks(2, _loaded_pieces):
        assert "module.0.weight has shape (3, 1, 3, 3) (expected (6, 1, 3, 3), the shape of" in text


def test_split_own_filters_without_channels_raises() -> None:
    def run(comm: collective.Communicator) -> None:
        with pytest.raises(collective.InvalidArgumentError, match=r"own.*with channels=1"):
            Split(nn.Conv2d(1, 4, 3), data=(2,), comm=comm, filters="own")

    run_ranks(2, run)


class Writing(nn.Module):
    """A module that modifies the weight of its layer in ``forward``."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.write = nn.Conv2d(1, 4, 3), write

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.write(self.layer.weight)
        return self.layer(x)


_WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda weight: weight.mul_(2),
    "data": lambda weight: weight.data.clamp_(-1, 1),
}


@pytest.mark.parametrize("how", _WRITES)
def test_split_write_to_weight_piece_in_forward_raises(how: str) -> None:
    def run(comm: collective.Communicator) -> None:
        split = Split(Writing(_WRITES[how]), channels=2, comm=comm, filters="own")
        with pytest.raises(collective.UnsupportedError, match="without autograd"):
            split(torch.ones(1, 1, 8, 8))

    run_ranks(2, run)


# -- parameters that change --------------------------------------------------------------------


def _convolutions(comm: collective.Communicator, **how: Any) -> tuple[nn.Module, Split]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 3)).double()
    return model, Split(model, comm=comm, **how)


def _replaced(comm: collective.Communicator) -> bool:
    model, split = _convolutions(comm, data=(2,))
    model[2] = nn.Conv2d(2, 2, 3).double()  # each rank draws its own weights
    x = torch.ones(1, 1, 8, 8, dtype=torch.float64)
    return torch.allclose(split(x), model(x))


def test_split_gives_replaced_parameters_values_of_rank_0() -> None:
    assert run_ranks(2, _replaced) == [True, True]


def _replaced_on_one_rank(comm: collective.Communicator) -> str:
    model, split = _convolutions(comm, data=(2,))
    if comm.rank == 1:
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    try:
        split(torch.ones(1, 1, 8, 8, dtype=torch.float64))
    except collective.MismatchError as error:
        return str(error)
    return "no error"


def test_split_names_a_parameter_that_one_rank_has_replaced() -> None:
    for text in run_ranks(2, _replaced_on_one_rank):
        assert "Split: 2.weight was replaced" in text


def _replaced_pieces(comm: collective.Communicator) -> str:
    model, split = _convolutions(comm, channels=2, filters="own")
    model[2] = nn.Conv2d(2, 2, 3).double()
    try:
        split(torch.ones(1, 1, 8, 8, dtype=torch.float64))
    except collective.UnsupportedError as error:
        return str(error)
    return "no error"


def test_split_refuses_replaced_parameters_of_which_ranks_have_pieces() -> None:
    for text in run_ranks(2, _replaced_pieces):
        assert "2.weight was replaced after the Split was made" in text
