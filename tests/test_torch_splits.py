"""PyTorch modules computed in pieces, in turn and over ranks, against the same modules whole."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import collective  # noqa: E402
from collective.adapters.torch import DistributedDataParallel, Split  # noqa: E402
from collective.testing import run_ranks  # noqa: E402

_CLOSE = 1e-12


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    # Two that share a busy core with other programs wait for each other most of the time.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class UNet(nn.Module):
    """Two levels: a skip by concatenation, a residual sum, odd sizes made to fit by padding."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda channels: nn.Identity()) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm(4), nn.ReLU(inplace=True))
        self.low = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.join = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Any) -> Any:
        a = self.down(x)
        b = self.low(functional.max_pool2d(a, 2))
        b = self.up(torch.relu(self.bottom(b)) + b)
        missing = a.shape[3] - b.shape[3], a.shape[2] - b.shape[2]
        b = functional.pad(b, (0, missing[0], 0, missing[1]))
        return self.out(functional.relu(self.join(torch.cat([b, a], 1))))


class Resized(nn.Module):
    """Pooling that hangs over the end, resizing to a skip's size, and a mean over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect")
        self.out = nn.Conv2d(4, 1, 2, stride=2, padding=1)

    def forward(self, x: Any) -> Any:
        a = self.down(x)
        b = functional.avg_pool2d(a, 3, 2, 1, ceil_mode=True)
        b = functional.interpolate(b, size=a.shape[2:], mode="bilinear")
        return self.out((a * 2 + b)[:, :, 1:])


def vgg() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet,
    "resized": Resized,
    "vgg": vgg,
    "batch norm": lambda: UNet(nn.BatchNorm2d),
    "group norm": lambda: UNet(lambda channels: nn.GroupNorm(2, channels)),
    "instance norm": lambda: UNet(lambda channels: nn.InstanceNorm2d(channels, affine=True)),
}


def made(name: str) -> tuple[nn.Module, Any]:
    """Return a model and its input, float64, the same wherever this is called."""
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        return MODELS[name]().double(), torch.randn(2, 1, 21, 18, dtype=torch.float64)


def outcome(module: Any, x: Any, run: Callable[[Any], Any]) -> list[Any]:
    """Return output, buffers and all gradients of a forward and backward pass."""
    x = x.clone().requires_grad_()
    y = run(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    (y * weights).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *gradients, *(b.clone() for b in module.buffers())]


def far(found: list[Any], expected: list[Any]) -> float:
    """Return the largest difference, relative to the elements of its array.

    Where an array is next to zero (the gradient of what a normalisation takes out), relative to
    a hundredth of the largest of all.
    """
    assert [a.shape for a in found] == [b.shape for b in expected]
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected) if b.numel()]
    most = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(most / 100)) for a, b in pairs)


def whole(name: str) -> list[Any]:
    module, x = made(name)
    return outcome(module, x, module)


# -- in turn ---------------------------------------------------------------------------------

_IN_TURN = [
    {"data": (5,)},
    {"data": (4, 3)},
    {"data": (40,)},
    {"batch": 2},
    {"channels": 3},
    {"batch": 2, "channels": 3, "data": (3, 2)},
]


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("how", _IN_TURN, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_in_turn(name: str, how: dict[str, Any], recompute: bool) -> None:
    module, x = made(name)
    split = Split(module, recompute=recompute, **how)
    assert far(outcome(module, x, split), whole(name)) < _CLOSE
    assert not split.joined


def _layers(seed: int, count: int) -> Iterator[tuple[nn.Module, Any]]:
    """Yield random convolutions and transposed ones, of one to three data axes."""
    chance = random.Random(seed)
    while count:
        axes, groups = chance.randint(1, 3), chance.choice([1, 1, 2, 4])

        def each(most: int, least: int = 1, axes: int = axes) -> tuple[int, ...]:
            return tuple(chance.randint(least, most) for _ in range(axes))

        stride, dilation = each(4), each(3)
        how: dict[str, Any] = {
            "stride": stride,
            "dilation": dilation,
            "padding": each(4, 0),
            "groups": groups,
        }
        if chance.random() < 0.5:
            kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        else:
            kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
            most = [max(pair) - 1 for pair in zip(stride, dilation)]
            how["output_padding"] = tuple(chance.randint(0, each_most) for each_most in most)
        layer = kind(4, 8, each(5), **how).double()
        x = torch.randn(2, 4, *each(14 if axes < 3 else 7, 2), dtype=torch.float64)
        try:
            there = layer(x).numel() > 0
        except RuntimeError:  # an output of no rows
            there = False
        if there:
            count -= 1
            yield layer, x


@pytest.mark.parametrize("seed", range(6))
def test_random_layers_in_turn(seed: int) -> None:
    torch.manual_seed(seed)
    chance = random.Random(seed)
    for layer, x in _layers(seed, 30):
        expected = outcome(layer, x, layer)
        alike = copy.deepcopy(layer)
        alike.zero_grad()
        how = {
            "data": tuple(chance.randint(1, 9) for _ in range(x.dim() - 2)),
            "channels": chance.randint(1, 3),
            "batch": chance.randint(1, 2),
            "recompute": chance.random() < 0.5,
        }
        found = outcome(alike, x, Split(alike, **how))
        assert far(found, expected) < _CLOSE, (layer, x.shape, how)


@pytest.mark.parametrize("module", [nn.Dropout(0.4), nn.Dropout2d(0.4)], ids=["each", "channel"])
@pytest.mark.parametrize("how", [{"data": (3,)}, {"channels": 2}, {"batch": 2}], ids=str)
def test_dropout_drops_what_the_module_drops(module: nn.Module, how: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), module, nn.Conv2d(4, 1, 3)).double()
    x = torch.randn(2, 1, 12, 9, dtype=torch.float64)
    torch.manual_seed(3)
    expected = outcome(model, x, model)
    model.zero_grad()
    torch.manual_seed(3)
    assert far(outcome(model, x, Split(model, **how)), expected) < _CLOSE


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

_OVER_RANKS = [
    (2, {"data": (2,)}),
    (3, {"data": (1, 3)}),
    (4, {"data": (2, 2)}),
    (3, {"channels": 3}),
    (2, {"batch": 2}),
    (4, {"data": (2, 2), "halo": "chain"}),
    (4, {"batch": 2, "data": (2,), "halo": "chain", "recompute": False}),
    (8, {"batch": 2, "channels": 2, "data": (2,)}),
]


def _on_a_rank(
    comm: collective.Communicator, module: nn.Module, x: Any, how: dict[str, Any]
) -> list[Any]:
    module = copy.deepcopy(module)  # ranks are threads here
    module.zero_grad()
    return outcome(module, x, Split(module, comm=comm, **how))


@pytest.mark.parametrize(("size", "how"), _OVER_RANKS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_over_ranks(name: str, size: int, how: dict[str, Any]) -> None:
    expected = whole(name)
    for found in run_ranks(size, _on_a_rank, *made(name), how):
        assert far(found, expected) < _CLOSE


@pytest.mark.parametrize("seed", range(3))
def test_random_layers_over_ranks(seed: int) -> None:
    torch.manual_seed(seed)
    chance = random.Random(seed)
    for layer, x in _layers(seed + 50, 12):
        size = chance.choice([2, 3, 4])
        how = chance.choice(
            [{"data": (size,)}, {"channels": size}, {"data": (size,), "halo": "chain"}]
        )
        expected = outcome(layer, x, layer)
        for found in run_ranks(size, _on_a_rank, layer, x, how):
            assert far(found, expected) < _CLOSE, (layer, x.shape, size, how)


def _pieces(comm: collective.Communicator, module: nn.Module, x: Any) -> tuple[Any, Any, list[Any]]:
    module = copy.deepcopy(module)
    mine = x[:, :, :15] if comm.rank == 0 else x[:, :, 15:]  # not as the library would cut
    mine = mine.clone().requires_grad_()
    split = Split(module, data=(2,), comm=comm, inputs="pieces", outputs="pieces")
    y = split(mine)
    weights = torch.linspace(-1, 2, 2 * 21 * 18, dtype=y.dtype).reshape(2, 1, 21, 18)
    (y * (weights[:, :, :11] if comm.rank == 0 else weights[:, :, 11:])).sum().backward()
    return y.detach(), mine.grad, [p.grad for p in module.parameters()]


def test_pieces_go_in_and_come_out() -> None:
    y, x_gradient, *gradients = whole("unet")
    ranks = run_ranks(2, _pieces, *made("unet"))
    assert far([torch.cat([each[0] for each in ranks], 2)], [y]) < _CLOSE
    assert far([torch.cat([each[1] for each in ranks], 2)], [x_gradient]) < _CLOSE
    for _, _, found in ranks:
        assert far(found, gradients) < _CLOSE


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


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"data": (0,)}, "positive integers"),
        ({"batch": 1.5}, "positive integers"),
        ({"halo": "row"}, "one of layer, chain"),
        ({"halo": "chain"}, "without comm"),
        ({"inputs": "pieces"}, "without comm"),
    ],
    ids=str,
)
def test_options_that_are_refused(how: dict[str, Any], text: str) -> None:
    with pytest.raises(collective.InvalidArgumentError, match=text):
        Split(nn.Conv2d(1, 1, 3), **how)


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
