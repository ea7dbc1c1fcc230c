"""PyTorch modules of which each rank has its own filters alone, against one process's."""

from __future__ import annotations

import copy
import re
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
_STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    # Two that share a busy core with other programs wait for each other most of the time.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class UNet(nn.Module):
    """A skip by concatenation and a residual sum, so that channels are joined between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.low = nn.Conv2d(4, 6, 3, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.join = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Any) -> Any:
        a = torch.tanh(self.down(x))
        b = torch.tanh(self.low(functional.max_pool2d(a, 2)))
        b = self.up(torch.tanh(self.bottom(b)) + b)
        return self.out(torch.tanh(self.join(torch.cat([b, a], 1))))


class Elsewhere(nn.Module):
    """Weights that other functions than their layers' use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        scaled = self.first.weight / self.first.weight.norm()
        x = torch.tanh(functional.conv2d(x, scaled, self.first.bias))
        x = self.second(x) * self.second.bias.reshape(-1, 1, 1)
        assert self.last.weight.shape == (5, 6)
        x = functional.linear(self.last(x), self.last.weight.T)
        return x + self.first.weight.sum()


def _tower(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*copy.deepcopy(layers))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pairs": _tower(
        *(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2, bias=False), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)),
    ),
    "unet": UNet,
    "uneven": _tower(nn.Conv2d(1, 5, 3), nn.Tanh(), nn.Conv2d(5, 7, 3), nn.Conv2d(7, 7, 2)),
    "fewer channels than ranks": _tower(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 5, 3), nn.Conv2d(5, 1, 1)),
    "groups": _tower(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 2)),
    "depthwise": _tower(
        *(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1)),
        nn.ConvTranspose2d(6, 6, 3, groups=6),
    ),
    "norms": _tower(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Conv2d(4, 6, 3)),
        *(nn.GroupNorm(2, 6), nn.Conv2d(6, 2, 1)),
    ),
    "elsewhere": Elsewhere,
}


def made(name: str) -> tuple[nn.Module, Any]:
    """Return a model and its input, float64, the same wherever this is called."""
    random = torch.Generator().manual_seed(7)  # ranks that are threads share the global one
    module = MODELS[name]().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return module, torch.randn(2, 1, 10, 10, dtype=torch.float64, generator=random)


def trained(module: Any, x: Any) -> dict[str, Any]:
    """Train for some steps; return the last output, the input's gradient, and the state."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    x = x.clone().requires_grad_()
    for _ in range(_STEPS):
        optimizer.zero_grad()
        y = module(x)
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
        (y * weights).sum().backward()
        optimizer.step()
    state = {name.removeprefix("module."): each for name, each in module.state_dict().items()}
    return {"y": y.detach(), "x": x.grad, **state}


def far(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference, relative to the largest element of its tensor."""
    assert {name: each.shape for name, each in found.items()} == {
        name: each.shape for name, each in expected.items()
    }
    pairs = [(found[name].double(), each.double()) for name, each in expected.items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def split_of(comm: collective.Communicator, name: str, **how: Any) -> tuple[Split, Any]:
    module, x = made(name)
    return Split(
        module, channels=how.pop("channels", comm.size), comm=comm, filters="own", **how
    ), x


def _trained_on_a_rank(comm: collective.Communicator, name: str, how: Any) -> dict[str, Any]:
    return trained(*split_of(comm, name, **how))


# -- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_one_process(name: str, size: int) -> None:
    expected = trained(*made(name))
    for found in run_ranks(size, _trained_on_a_rank, name, {}):
        assert far(found, expected) < _CLOSE


def test_training_is_that_of_one_process_over_shared_memory() -> None:
    expected = trained(*made("pairs"))
    for found in run_ranks(2, _trained_on_a_rank, "pairs", {}, backend="shm"):
        assert far(found, expected) < _CLOSE


@pytest.mark.parametrize("how", [{"data": (2,)}, {"batch": 2}], ids=str)
def test_rows_and_samples_are_cut_besides(how: dict[str, Any]) -> None:
    expected = trained(*made("unet"))
    for found in run_ranks(4, _trained_on_a_rank, "unet", {"channels": 2, **how}):
        assert far(found, expected) < _CLOSE


def _within_data_parallel(comm: collective.Communicator) -> dict[str, Any]:
    channels, samples = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    split, x = split_of(channels, "pairs")
    model = DistributedDataParallel(split, samples)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(x[comm.rank // 2 :][:1]).square().mean().backward()
        optimizer.step()
    return {name.removeprefix("module."): each for name, each in split.state_dict().items()}


def test_split_within_data_parallel_training() -> None:
    module, x = made("pairs")
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    for found in run_ranks(4, _within_data_parallel):
        assert far(found, module.state_dict()) < _CLOSE


def _bytes_of(module: Any, x: Any) -> int:
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    module(x).sum().backward()
    optimizer.step()
    momentum = sum(optimizer.state[each]["momentum_buffer"].nbytes for each in module.parameters())
    return sum(each.nbytes + each.grad.nbytes for each in module.parameters()) + momentum


def _bytes_on_a_rank(comm: collective.Communicator) -> tuple[int, tuple[int, int]]:
    split, x = split_of(comm, "pairs")
    return _bytes_of(split, x), split.memory_report(x).weights


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_has_its_part_of_weights_gradients_and_momentum(size: int) -> None:
    module, x = made("pairs")
    whole = _bytes_of(module, x)
    replicated = 3 * 8 * 3  # the last bias, with gradient and momentum; the other row has none
    ranks = run_ranks(size, _bytes_on_a_rank)
    assert sum(each for each, _ in ranks) == whole + (size - 1) * replicated
    largest = max(each for each, _ in ranks)
    assert largest < whole / size * (1.1 if size == 2 else 1.4)  # six channels over four ranks
    for each, weights in ranks:
        assert weights == (whole // 3, each // 3)


def _verified(comm: collective.Communicator) -> Any:
    split, x = split_of(comm, "unet")
    return split.verify(x)


def test_verify_compares_gradients_of_all_weights() -> None:
    for verification in run_ranks(2, _verified):
        assert verification
        assert len(verification.differences) == 6 + 1 + 12


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


def _loaded(comm: collective.Communicator, state: dict[str, Any]) -> tuple[Any, Any]:
    split, x = split_of(comm, "pairs")
    split.load_state_dict(state)
    return split(x).detach(), split.module.state_dict()


@pytest.mark.parametrize("size", [2, 3])
def test_a_state_does_not_depend_on_the_number_of_ranks(size: int) -> None:
    module, x = made("pairs")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    state = {f"module.{name}": each for name, each in module.state_dict().items()}
    for y, found in run_ranks(size, _loaded, state):
        assert far({"y": y}, {"y": module(x).detach()}) < _CLOSE
        for name, each in module.state_dict().items():
            assert torch.equal(found[name], each)


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


def _refused(comm: collective.Communicator, module: nn.Module) -> str:
    with pytest.raises(collective.CollectiveError) as caught:
        Split(module, channels=2, comm=comm, filters="own")
    return str(caught.value)


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    return module


def _one_bias() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 4))
    module[1].bias = module[0].bias
    return module


def _one_memory() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight.data = module[0].weight.data
    return module


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (_tied(), r"0.weight and 1.weight are one parameter.*filters='all'"),
        (_one_bias(), r"0.bias and 1.bias are one parameter.*filters='all'"),
        (_one_memory(), r"0.weight and 1.weight are one parameter.*filters='all'"),
        (nn.Sequential(nn.LazyConv2d(4, 3)), "0 has no weights yet. Call the module once"),
    ],
    ids=["tied", "one bias", "one memory", "lazy"],
)
def test_weights_that_cannot_be_cut(module: nn.Module, text: str) -> None:
    for found in run_ranks(2, _refused, module):
        assert re.search(text, found), found


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"filters": "own"}, "without comm"),
        ({"filters": "mine"}, "one of all, own"),
    ],
    ids=str,
)
def test_options_that_are_refused(how: dict[str, Any], text: str) -> None:
    with pytest.raises(collective.InvalidArgumentError, match=text):
        Split(nn.Conv2d(1, 1, 3), **how)


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


def test_a_rank_s_part_is_not_computed_by_itself() -> None:
    def run(comm: collective.Communicator) -> None:
        split, x = split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match="0 has this rank's filters alone"):
            split.module(x)

    run_ranks(2, run)


def test_a_rank_s_part_is_not_copied() -> None:
    def run(comm: collective.Communicator) -> None:
        split, _ = split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match="cannot be copied"):
            copy.deepcopy(split.module)

    run_ranks(2, run)
