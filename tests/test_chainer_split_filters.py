"""Chainer links of which each rank has its own filters alone, against one process's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# First, as it is what makes Chainer's import work.
pytest.importorskip("collective.adapters.chainer.functional")

import chainer
import chainer.functions as F
import chainer.links as L

import collective
from collective.adapters.chainer.splits import Split
from collective.testing import run_ranks

_CLOSE = 1e-12
_STEPS = 3


class UNet(chainer.Chain):
    """A skip by concatenation and a residual sum, so that channels are joined between layers."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.down = L.Convolution2D(1, 4, 3, pad=1)
            self.low = L.Convolution2D(4, 6, 3, pad=1)
            self.bottom = L.Convolution2D(6, 6, 3, pad=1)
            self.up = L.Deconvolution2D(6, 4, 2, 2)
            self.join = L.Convolution2D(8, 4, 3, pad=1)
            self.out = L.Convolution2D(4, 1, 1)

    def forward(self, x: Any) -> Any:
        a = F.tanh(self.down(x))
        b = F.tanh(self.low(F.max_pooling_2d(a, 2)))
        b = self.up(F.tanh(self.bottom(b)) + b)
        return self.out(F.tanh(self.join(F.concat([b, a], axis=1))))


class Elsewhere(chainer.Chain):
    """Weights that other functions than their layers' use."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.second = L.Convolution2D(1, 4, 3), L.Convolution2D(4, 4, 3)
            self.last = L.Linear(144, 5)

    def forward(self, x: Any) -> Any:
        x = F.tanh(F.convolution_2d(x, self.first.W * 2.0, self.first.b))
        x = self.second(x)
        x = x * F.broadcast_to(F.reshape(self.second.b, (1, -1, 1, 1)), x.shape)
        x = F.linear(self.last(x), F.transpose(self.last.W))
        return x + F.broadcast_to(F.sum(self.first.W), x.shape)


MODELS: dict[str, Callable[[], Any]] = {
    "pairs": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 6, 3), F.tanh, L.Convolution2D(6, 4, 3, 2, nobias=True), F.tanh),
        *(L.Linear(36, 8), F.tanh, L.Linear(8, 3)),
    ),
    "unet": UNet,
    "uneven": lambda: chainer.Sequential(
        *(L.ConvolutionND(2, 1, 5, 3), F.tanh, L.ConvolutionND(2, 5, 7, 3)),
        L.ConvolutionND(2, 7, 7, 2),
    ),
    "fewer channels than ranks": lambda: chainer.Sequential(
        L.Convolution2D(1, 2, 3), L.Convolution2D(2, 5, 3), L.Convolution2D(5, 1, 1)
    ),
    "groups": lambda: chainer.Sequential(
        L.Convolution2D(1, 4, 3), L.Convolution2D(4, 4, 3, groups=2), L.Convolution2D(4, 4, 2)
    ),
    "depthwise": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 4, 3), F.tanh, L.Convolution2D(4, 4, 3, groups=4)),
        *(L.Convolution2D(4, 6, 1), L.Deconvolution2D(6, 6, 3, groups=6)),
    ),
    "norms": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 4, 3), L.BatchNormalization(4), F.tanh, L.Convolution2D(4, 6, 3)),
        L.Convolution2D(6, 2, 1),
    ),
    "elsewhere": Elsewhere,
}


def made(name: str) -> tuple[Any, Any]:
    """Return a link and its input, float64, the same wherever this is called."""
    random = np.random.RandomState(7)
    with chainer.using_config("dtype", np.float64):
        link = MODELS[name]()
    for parameter in link.params():
        parameter.array[...] = random.randn(*parameter.shape) / 3
    return link, random.randn(2, 1, 10, 10)


def state_of(link: Any) -> dict[str, Any]:
    """Return what is serialized of a link, whole, under its own names."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(link)
    return {
        name.removeprefix("link/"): np.array(each)
        for name, each in serializer.target.items()
        if each is not None
    }


def trained(link: Any, x: Any) -> dict[str, Any]:
    """Train for some steps; return the last output, the input's gradient, and the state."""
    optimizer = chainer.optimizers.MomentumSGD(0.01, 0.9).setup(link)
    for _ in range(_STEPS):
        given = chainer.Variable(x.copy())
        link.cleargrads()
        y = link(given)
        F.sum(y * np.linspace(-1, 2, y.size).reshape(y.shape)).backward()
        optimizer.update()
    return {"y": y.array, "x": given.grad, **state_of(link)}


def far(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference, relative to the largest element of its array."""
    assert {name: each.shape for name, each in found.items()} == {
        name: each.shape for name, each in expected.items()
    }
    pairs = [(found[name], each) for name, each in expected.items()]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in pairs)


def split_of(comm: collective.Communicator, name: str, **how: Any) -> tuple[Split, Any]:
    link, x = made(name)
    return Split(link, comm=comm, filters="own", **{"channels": comm.size, **how}), x


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


def _bytes_of(link: Any, x: Any) -> int:
    optimizer = chainer.optimizers.MomentumSGD(0.01, 0.9).setup(link)
    link.cleargrads()
    F.sum(link(x)).backward()
    optimizer.update()
    return sum(
        each.array.nbytes + each.grad.nbytes + each.update_rule.state["v"].nbytes
        for each in link.params()
    )


def _bytes_on_a_rank(comm: collective.Communicator) -> tuple[int, tuple[int, int]]:
    split, x = split_of(comm, "pairs")
    return _bytes_of(split, x), split.memory_report(x).weights


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_has_its_part_of_weights_gradients_and_momentum(size: int) -> None:
    whole = _bytes_of(*made("pairs"))
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


# -- the state -------------------------------------------------------------------------------


def _loaded(comm: collective.Communicator, path: str) -> tuple[Any, Any]:
    split, x = split_of(comm, "pairs")
    chainer.serializers.load_npz(path, split)
    return split(x).array, state_of(split)


@pytest.mark.parametrize("size", [2, 3])
def test_a_state_does_not_depend_on_the_number_of_ranks(size: int, tmp_path: Any) -> None:
    link, x = made("pairs")
    for parameter in link.params():
        parameter.array *= 2
    path = str(tmp_path / "link.npz")
    np.savez(path, **{f"link/{name}": each for name, each in state_of(link).items()})
    for y, found in run_ranks(size, _loaded, path):
        assert far({"y": y}, {"y": link(x).array}) < _CLOSE
        for name, each in state_of(link).items():
            np.testing.assert_array_equal(found[name], each)


# -- what is refused -------------------------------------------------------------------------


def _tied() -> Any:
    link = chainer.Sequential(L.Linear(4, 4), L.Linear(4, 4))
    link[1].W = link[0].W
    return link


def _one_bias() -> Any:
    link = chainer.Sequential(L.Linear(4, 4), L.Linear(8, 4))
    link[1].b = link[0].b
    return link


def _one_array() -> Any:
    link = chainer.Sequential(L.Linear(4, 4), L.Linear(4, 4))
    link[1].W.array = link[0].W.array
    return link


_REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tied": (_tied, "/0/W and /1/W are one parameter.*filters='all'"),
    "one bias": (_one_bias, "/0/b and /1/b are one parameter.*filters='all'"),
    "one array": (_one_array, "/0/W and /1/W are one parameter.*filters='all'"),
    "not made yet": (lambda: chainer.Sequential(L.Linear(None, 4)), "/0 .* has no weights yet"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_weights_that_cannot_be_cut(case: str) -> None:
    make, text = _REFUSED[case]

    def run(comm: collective.Communicator) -> str:
        with pytest.raises(collective.CollectiveError) as caught:
            Split(make(), channels=2, comm=comm, filters="own")
        return str(caught.value)

    for found in run_ranks(2, run):
        assert re.search(text, found), found


def test_a_rank_s_part_is_not_computed_by_itself() -> None:
    def run(comm: collective.Communicator) -> None:
        split, x = split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match="has this rank's filters alone"):
            split.link(x)

    run_ranks(2, run)


def test_a_rank_s_part_is_not_copied() -> None:
    def run(comm: collective.Communicator) -> None:
        split, _ = split_of(comm, "pairs")
        with pytest.raises(collective.UnsupportedError, match="cannot be copied"):
            split.link.copy("copy")

    run_ranks(2, run)
