"""PyTorch modules of which each rank has its own filters alone: beside test_split_filters.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import collective  # noqa: E402
from collective.adapters.torch import DistributedDataParallel, Split  # noqa: E402
from collective.testing import run_ranks  # noqa: E402
from tests.split_filters_torch import STEPS, made, split_of  # noqa: E402
from tests.split_frameworks import one_thread  # noqa: E402

__all__ = ["one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


def _within_data_parallel(comm: collective.Communicator) -> dict[str, Any]:
    channels, samples = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    split, x = split_of(channels, "pairs")
    model = DistributedDataParallel(split, samples)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x[comm.rank // 2 :][:1]).square().mean().backward()
        optimizer.step()
    return {name.removeprefix("module."): each for name, each in split.state_dict().items()}


def test_split_within_data_parallel_training() -> None:
    module, x = made("pairs")
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    for found in run_ranks(4, _within_data_parallel):
        torch.testing.assert_close(found, dict(module.state_dict()), rtol=1e-12, atol=1e-12)


def _middle_axis(comm: collective.Communicator, module: nn.Module, x: Any) -> list[Any]:
    module = copy.deepcopy(module)
    Split(module, channels=2, comm=comm)(x).square().sum().backward()
    return [each.grad for each in module.parameters()]


def test_a_linear_layer_along_rows_of_some_channels_has_the_gradient_of_all() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Linear(6, 5), nn.Conv1d(4, 2, 1)).double()
    x = torch.randn(2, 1, 8, dtype=torch.float64)
    for found in run_ranks(2, _middle_axis, module, x):
        module.zero_grad()
        module(x).square().sum().backward()
        for gradient, parameter in zip(found, module.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-12)


# -- the state -------------------------------------------------------------------------------


def _loaded_pieces(comm: collective.Communicator) -> str:
    split, _ = split_of(comm, "pairs")
    pieces = {name: each.detach() for name, each in split.named_parameters()}
    with pytest.raises(collective.ShapeError) as caught:
        split.load_state_dict(pieces)
    return str(caught.value)


def test_a_state_of_pieces_is_refused() -> None:
    for text in run_ranks(2, _loaded_pieces):
        assert "module.0.weight of shape (3, 1, 3, 3); (6, 1, 3, 3), the whole parameter" in text


# -- what is refused -------------------------------------------------------------------------


def test_filters_are_those_of_channels() -> None:
    def run(comm: collective.Communicator) -> None:
        with pytest.raises(collective.InvalidArgumentError, match=r"own.*with channels=1"):
            Split(nn.Conv2d(1, 4, 3), data=(2,), comm=comm, filters="own")

    run_ranks(2, run)


class Writing(nn.Module):
    """A layer whose weights its parent changes in forward."""

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
def test_writing_into_a_piece_within_forward(how: str) -> None:
    def run(comm: collective.Communicator) -> None:
        split = Split(Writing(_WRITES[how]), channels=2, comm=comm, filters="own")
        with pytest.raises(collective.UnsupportedError, match="behind autograd's back"):
            split(torch.ones(1, 1, 8, 8))

    run_ranks(2, run)
