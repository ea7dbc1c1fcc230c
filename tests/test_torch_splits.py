"""PyTorch modules computed in pieces, in turn and over ranks: beside test_splits.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import collective  # noqa: E402
from collective.adapters.torch import DistributedDataParallel, Split  # noqa: E402
from collective.testing import run_ranks  # noqa: E402
from tests.split_frameworks import one_thread  # noqa: E402
from tests.split_models_torch import made, outcome  # noqa: E402
from tests.test_splits import CLOSE, far  # noqa: E402

__all__ = ["one_thread"]
pytestmark = pytest.mark.usefixtures("one_thread")


# -- in turn ---------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [nn.Dropout(0.4), nn.Dropout2d(0.4)], ids=["each", "channel"])
@pytest.mark.parametrize("how", [{"data": (3,)}, {"channels": 2}, {"batch": 2}], ids=str)
def test_dropout_drops_what_the_module_drops(module: nn.Module, how: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), module, nn.Conv2d(4, 1, 3)).double()
    x = torch.randn(2, 1, 12, 9, dtype=torch.float64)
    torch.manual_seed(3)
    expected = outcome(model, x, model)
    torch.manual_seed(3)
    assert far(outcome(model, x, Split(model, **how)), expected) < CLOSE


def test_a_function_without_a_rule_gets_the_whole_tensor() -> None:
    class Sorted(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.sort(torch.relu(x), dim=2).values * 2

    x = torch.randn(1, 1, 9, 4)
    split = Split(Sorted(), data=(3,))
    assert torch.equal(split(x), Sorted()(x))
    assert split.joined == ("Sorted (sort)",)


def test_strict_refuses_it() -> None:
    split = Split(nn.Sequential(nn.Conv2d(1, 1, 3), nn.Softmax(2)), data=(2,), strict=True)
    with pytest.raises(collective.UnsupportedError, match=r"1 \(Softmax\) \(softmax\).*strict"):
        split(torch.ones(1, 1, 8, 8))


# -- over ranks ------------------------------------------------------------------------------


def _masks(comm: collective.Communicator) -> Any:
    torch.manual_seed(comm.rank)
    split = Split(nn.Dropout(0.5), data=(2,), comm=comm)
    return split(torch.ones(1, 1, 64, 2)).detach()


def test_ranks_drop_by_one_mask() -> None:
    first, second = run_ranks(2, _masks)
    assert torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}


def _differing(comm: collective.Communicator) -> str:
    split = Split(nn.Conv2d(1, 1, 3), data=(2,), comm=comm)
    try:
        split(torch.full((1, 1, 8, 8), float(comm.rank)))
    except collective.MismatchError as error:
        return str(error)
    return "nothing"


def test_inputs_that_differ_are_found_where_calls_are_compared() -> None:
    for found in run_ranks(2, _differing, check="always"):
        assert "the inputs of ranks 0 and 1 differ" in found


def _normalised(comm: collective.Communicator, x: Any) -> Any:
    return Split(nn.BatchNorm2d(4), data=(comm.size,), comm=comm)(x).detach()


@pytest.mark.parametrize("size", [1, 2])
def test_sums_of_half_precision_are_single(size: int) -> None:
    x = (torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0)) + 10).half()
    # The sum of a channel is more than half precision has numbers for.
    expected = nn.BatchNorm2d(4)(x.float()).detach().half()
    if size == 1:
        found = [Split(nn.BatchNorm2d(4), data=(4,))(x).detach()]
    else:
        found = run_ranks(size, _normalised, x)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=2e-3)


# -- what is refused -------------------------------------------------------------------------


def test_pieces_are_as_many_as_ranks() -> None:
    def run(comm: collective.Communicator) -> None:
        with pytest.raises(
            collective.InvalidArgumentError, match="4 pieces; one for each of the 2"
        ):
            Split(nn.Conv2d(1, 1, 3), data=(2, 2), comm=comm)

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Sequential(Split(nn.Conv2d(1, 1, 3))), "0 is a Split.*in one call"),
        (nn.Sequential(nn.SyncBatchNorm(3)), "0 is a SyncBatchNorm.*BatchNorm that it replaces"),
        (nn.parallel.DataParallel(nn.Sequential(nn.ReLU())), "Wrap the split in it"),
    ],
    ids=["split", "norm", "replicated"],
)
def test_modules_that_are_refused(module: nn.Module, text: str) -> None:
    with pytest.raises(collective.UnsupportedError, match=text):
        Split(module, data=(2,))


def test_axes_that_the_input_has_not() -> None:
    with pytest.raises(collective.ShapeError, match=r"data=\(2, 2\) of an input with 1 data axes"):
        Split(nn.Conv1d(1, 1, 3), data=(2, 2))(torch.ones(1, 1, 8))


# -- what it tells ---------------------------------------------------------------------------


def test_verify_finds_nothing() -> None:
    module, x = made("unet")
    verification = Split(module, data=(3,)).verify(x)
    assert verification
    assert verification.largest < 1e-9


def test_verify_names_the_first_layer_that_differs() -> None:
    class Position(nn.Module):
        """Computes what depends on how many rows there are: in pieces other numbers."""

        def forward(self, x: Any) -> Any:
            return x * functional.relu(x).detach() if type(x) is torch.Tensor else x * 3

    model = nn.Sequential(nn.Conv2d(1, 2, 3), Position(), nn.Conv2d(2, 1, 3))
    verification = Split(model, data=(2,)).verify(torch.randn(1, 1, 12, 8))
    assert not verification
    assert "the output of 1 (Position) is the first that differs" in str(verification)


def test_memory_report_counts_what_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
    x = torch.randn(1, 1, 32, 32)
    report = Split(model, data=(4,)).memory_report(x)
    assert report.whole == {"1 (ReLU)": 8 * 30 * 30 * 4, "3 (ReLU)": 8 * 28 * 28 * 4}
    assert report.split == {}
    assert report.piece == 8 * 9 * 30 * 4 + 8 * 7 * 28 * 4  # and the two rows of the overlap
    assert report.ratio == report.piece / sum(report.whole.values())


def test_memory_report_counts_a_piece_within_a_piece() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3), nn.ReLU())
    report = Split(model, data=(2,), channels=4).memory_report(torch.randn(1, 1, 32, 32))
    # Two of the eight channels of 16 rows, and the result of the last convolution.
    assert report.piece == 2 * 16 * 30 * 4 + 2 * 14 * 28 * 4


def test_memory_report_counts_what_is_kept_without_recomputing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    report = Split(model, data=(2,), recompute=False).memory_report(torch.randn(1, 1, 32, 32))
    assert report.piece == 0
    assert sum(report.split.values()) == 2 * 8 * 16 * 30 * 4


def test_split_in_an_optimizer_has_the_modules_parameters() -> None:
    module, _ = made("unet")
    split = Split(module, data=(2,))
    assert {f"module.{name}" for name in module.state_dict()} == set(split.state_dict())
    assert all(a is b for a, b in zip(split.parameters(), module.parameters(), strict=True))


def _sum_over_rows_and_average_over_columns(
    comm: collective.Communicator, module: nn.Module, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    rows, columns = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    module = copy.deepcopy(module)
    model = DistributedDataParallel(Split(module, data=(2,), comm=rows), columns)
    mine = x.chunk(2)[comm.rank // 2]
    model(mine).square().mean().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_split_within_data_parallel_training() -> None:
    module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 2)).double()
    x = torch.randn(4, 2, 9, 7, dtype=torch.float64)
    module(x).square().mean().backward()
    for found in run_ranks(4, _sum_over_rows_and_average_over_columns, module, x):
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-14)
