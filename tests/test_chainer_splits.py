"""Chainer links computed in pieces, in turn and over ranks, against the same links whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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


class UNet(chainer.Chain):
    """Two levels: a skip by concatenation, a residual sum, odd sizes made to fit by padding."""

    def __init__(self, norm: Callable[[int], Any] | None = None) -> None:
        super().__init__()
        with self.init_scope():
            self.down = L.Convolution2D(1, 4, 3, pad=1)
            self.norm = F.identity if norm is None else norm(4)
            self.low = L.Convolution2D(4, 8, 3, pad=1)
            self.bottom = L.Convolution2D(8, 8, 3, pad=1)
            self.up = L.Deconvolution2D(8, 4, 2, 2)
            self.join = L.Convolution2D(8, 4, 3, pad=1)
            self.out = L.Convolution2D(4, 1, 1)

    def forward(self, x: Any) -> Any:
        a = F.relu(self.norm(self.down(x)))
        b = F.relu(self.low(F.max_pooling_2d(a, 2)))
        b = self.up(F.relu(self.bottom(b)) + b)[:, :, : a.shape[2], : a.shape[3]]
        return self.out(F.relu(self.join(F.concat([b, a], axis=1))))


class Pooled(chainer.Chain):
    """Padding, pooling by means, unpooling, and a slice."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.down = L.Convolution2D(1, 4, 3, pad=1)
            self.out = L.Convolution2D(4, 1, 2, stride=2, pad=1)

    def forward(self, x: Any) -> Any:
        a = self.down(F.pad(x, ((0, 0), (0, 0), (1, 2), (0, 0)), "constant"))
        b = F.average_pooling_2d(a, 3, 2, 1)
        b = F.unpooling_2d(b, 2, outsize=a.shape[2:])
        return self.out((a * 2 + b)[:, :, 1:])


def vgg() -> Any:
    return chainer.Sequential(
        *(L.Convolution2D(1, 4, 3, pad=1), F.relu, lambda x: F.max_pooling_2d(x, 2)),
        *(L.Convolution2D(4, 8, 3, pad=1), F.relu, lambda x: F.max_pooling_2d(x, 3, 2, 1)),
        *(L.Linear(8 * 6 * 5, 16), F.tanh, L.Linear(16, 3)),
    )


MODELS: dict[str, Callable[[], Any]] = {
    "unet": UNet,
    "pooled": Pooled,
    "vgg": vgg,
    "batch normalization": lambda: UNet(L.BatchNormalization),
    "group normalization": lambda: UNet(lambda channels: L.GroupNormalization(2, channels)),
}


def made(name: str) -> tuple[Any, Any]:
    """Return a link and its input, float64, the same wherever this is called."""
    random_numbers = np.random.RandomState(7)
    with chainer.using_config("dtype", np.float64):
        link = MODELS[name]()
    for parameter in link.params():
        parameter.array[...] = random_numbers.randn(*parameter.shape) / 3
    return link, random_numbers.randn(2, 1, 21, 18)


def outcome(link: Any, x: Any, run: Callable[[Any], Any]) -> list[Any]:
    """Return output, statistics and all gradients of a forward and backward pass."""
    link.cleargrads()
    x = chainer.Variable(x.copy())
    y = run(x)
    weights = np.linspace(-1, 2, y.size).reshape(y.shape)
    F.sum(y * weights).backward()
    kept = [array for path, array in sorted(persistent(link))]
    return [y.array, x.grad, *(p.grad for p in link.params() if p.grad is not None), *kept]


def persistent(link: Any) -> Iterator[tuple[str, Any]]:
    for path, child in link.namedlinks():
        for name in child._persistent:
            value = getattr(child, name)
            if isinstance(value, np.ndarray):
                yield f"{path}/{name}", value.copy()


def far(found: list[Any], expected: list[Any]) -> float:
    """Return the largest difference, relative to the elements of its array.

    Where an array is next to zero (the gradient of what a normalisation takes out), relative to
    a hundredth of the largest of all.
    """
    assert [a.shape for a in found] == [b.shape for b in expected]
    pairs = [(a, b) for a, b in zip(found, expected) if b.size]
    most = max(np.abs(b).max() for _, b in pairs)
    return max(np.abs(a - b).max() / max(np.abs(b).max(), most / 100) for a, b in pairs)


def whole(name: str) -> list[Any]:
    link, x = made(name)
    return outcome(link, x, link)


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
    link, x = made(name)
    split = Split(link, recompute=recompute, **how)
    assert far(outcome(link, x, split), whole(name)) < _CLOSE
    assert not split.joined


def _layers(seed: int, count: int) -> Iterator[tuple[Any, Any]]:
    """Yield random convolutions and transposed ones, of one to three data axes."""
    chance = random.Random(seed)
    while count:
        axes, groups = chance.randint(1, 3), chance.choice([1, 1, 2, 4])

        def each(most: int, least: int = 1, axes: int = axes) -> tuple[int, ...]:
            return tuple(chance.randint(least, most) for _ in range(axes))

        how: dict[str, Any] = {"pad": each(4, 0), "dilate": each(3), "groups": groups}
        kind: Any = L.ConvolutionND if chance.random() < 0.5 else L.DeconvolutionND
        with chainer.using_config("dtype", np.float64):
            layer = kind(axes, 4, 8, each(5), stride=each(4), **how)
        x = np.random.randn(2, 4, *each(14 if axes < 3 else 7, 2))
        try:
            there = layer(x).size > 0
        except (AssertionError, ValueError):  # an output of no rows
            there = False
        if there:
            count -= 1
            yield layer, x


@pytest.mark.parametrize("seed", range(4))
def test_random_layers_in_turn(seed: int) -> None:
    np.random.seed(seed)
    chance = random.Random(seed)
    for layer, x in _layers(seed, 25):
        expected = outcome(layer, x, layer)
        how = {
            "data": tuple(chance.randint(1, 9) for _ in range(x.ndim - 2)),
            "channels": chance.randint(1, 3),
            "batch": chance.randint(1, 2),
            "recompute": chance.random() < 0.5,
        }
        found = outcome(layer, x, Split(layer, **how))
        assert far(found, expected) < _CLOSE, (type(layer), x.shape, how)


@pytest.mark.parametrize("how", [{"data": (3,)}, {"channels": 2}, {"batch": 2}], ids=str)
def test_dropout_drops_what_the_function_drops(how: dict[str, Any]) -> None:
    with chainer.using_config("dtype", np.float64):
        link = chainer.Sequential(L.Convolution2D(1, 4, 3), F.dropout, L.Convolution2D(4, 1, 3))
    x = np.random.randn(2, 1, 12, 9)
    np.random.seed(3)
    expected = outcome(link, x, link)
    np.random.seed(3)
    assert far(outcome(link, x, Split(link, **how)), expected) < _CLOSE


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("corners", [True, False])
def test_images_are_resized(mode: str, corners: bool) -> None:
    def resize(x: Any) -> Any:  # which Chainer does in single precision only
        return F.resize_images(x * x, (15, 23), mode=mode, align_corners=corners)

    link = chainer.Sequential(resize)
    x = np.random.RandomState(1).randn(1, 2, 9, 13).astype(np.float32)
    split = Split(link, data=(4, 3))
    assert far(outcome(link, x, split), outcome(link, x, link)) < 1e-5
    assert not split.joined


def test_a_function_without_a_rule_gets_the_whole_variable() -> None:
    link = chainer.Sequential(F.relu, lambda x: F.flip(x, 2), F.relu)
    x = np.random.randn(1, 1, 9, 4).astype(np.float32)
    split = Split(link, data=(3,))
    np.testing.assert_array_equal(split(x).array, link(x).array)
    assert [name.endswith("(Flip)") for name in split.joined] == [True]


def test_mirrored_padding_has_chainers_gradient() -> None:
    link = chainer.Sequential(lambda x: F.pad(F.relu(x), ((0, 0), (0, 0), (2, 1), (1, 1)), "edge"))
    x = np.random.RandomState(1).randn(1, 2, 9, 13)
    assert far(outcome(link, x, Split(link, data=(4,))), outcome(link, x, link)) < _CLOSE


def test_the_array_of_a_cut_variable_is_the_whole() -> None:
    class Peeking(chainer.Chain):
        def forward(self, x: Any) -> Any:
            return F.relu(x) * float(F.relu(x).array.sum())

    x = np.random.randn(1, 1, 9, 4)
    np.testing.assert_allclose(Split(Peeking(), data=(3,))(x).array, Peeking()(x).array)


def test_strict_refuses_it() -> None:
    link = chainer.Sequential(lambda x: F.flip(x, 2))
    with pytest.raises(collective.UnsupportedError, match=r"\(Flip\).*strict"):
        Split(link, data=(2,), strict=True)(np.ones((1, 1, 8, 8), np.float32))


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


def _on_a_rank(comm: collective.Communicator, name: str, how: dict[str, Any]) -> list[Any]:
    link, x = made(name)
    return outcome(link, x, Split(link, comm=comm, **how))


@pytest.mark.parametrize(("size", "how"), _OVER_RANKS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_over_ranks(name: str, size: int, how: dict[str, Any]) -> None:
    expected = whole(name)
    for found in run_ranks(size, _on_a_rank, name, how):
        assert far(found, expected) < _CLOSE


def _pieces(comm: collective.Communicator) -> tuple[Any, Any, list[Any]]:
    link, x = made("unet")
    link.cleargrads()
    mine = chainer.Variable(x[:, :, :15] if comm.rank == 0 else x[:, :, 15:])
    split = Split(link, data=(2,), comm=comm, inputs="pieces", outputs="pieces")
    y = split(mine)
    weights = np.linspace(-1, 2, 2 * 21 * 18).reshape(2, 1, 21, 18)
    F.sum(y * (weights[:, :, :11] if comm.rank == 0 else weights[:, :, 11:])).backward()
    return y.array, mine.grad, [p.grad for p in link.params()]


def test_pieces_go_in_and_come_out() -> None:
    y, x_gradient, *gradients = whole("unet")
    ranks = run_ranks(2, _pieces)
    assert far([np.concatenate([each[0] for each in ranks], 2)], [y]) < _CLOSE
    assert far([np.concatenate([each[1] for each in ranks], 2)], [x_gradient]) < _CLOSE
    for _, _, found in ranks:
        assert far(found, gradients) < _CLOSE


def _masks(comm: collective.Communicator) -> Any:
    split = Split(chainer.Sequential(F.dropout), data=(2,), comm=comm)
    return split(np.ones((1, 1, 64, 2), np.float32)).array


def test_ranks_drop_by_one_mask() -> None:
    first, second = run_ranks(2, _masks)
    np.testing.assert_array_equal(first, second)
    assert set(np.unique(first)) == {0.0, 2.0}


# -- what it tells ---------------------------------------------------------------------------


def test_verify_finds_nothing() -> None:
    with chainer.using_config("dtype", np.float32):
        link = UNet(L.BatchNormalization)
    verification = Split(link, data=(3,)).verify(np.random.randn(2, 1, 21, 18))
    assert verification
    assert verification.largest < 1e-9


def test_verify_names_the_first_link_that_differs() -> None:
    class Shrinking(chainer.Link):
        """Computes what depends on whether its input is cut."""

        def forward(self, x: Any) -> Any:
            return x * (2.0 if type(x) is chainer.Variable else 3.0)

    link = chainer.Sequential(L.Convolution2D(1, 2, 3), Shrinking(), L.Convolution2D(2, 1, 3))
    verification = Split(link, data=(2,)).verify(np.random.randn(1, 1, 12, 8))
    assert not verification
    assert "(Shrinking) is the first that differs" in str(verification)


def test_memory_report_counts_what_is_kept() -> None:
    link = chainer.Sequential(L.Convolution2D(1, 8, 3), F.relu, L.Convolution2D(8, 8, 3), F.relu)
    x = np.random.randn(1, 1, 32, 32).astype(np.float32)
    report = Split(link, data=(4,)).memory_report(x)
    assert sum(report.whole.values()) >= 8 * (30 * 30 + 28 * 28) * 4
    assert report.split == {}
    assert 8 * (9 * 30 + 7 * 28) * 4 <= report.piece <= sum(report.whole.values()) / 3


@pytest.mark.parametrize(
    "norm",
    [L.BatchNormalization, lambda channels: L.GroupNormalization(4, channels)],
    ids=["batch", "group"],
)
def test_a_normalisation_in_turn_keeps_its_input_alone(norm: Callable[[int], Any]) -> None:
    link = chainer.Sequential(
        *(L.Convolution2D(1, 8, 3, pad=1), norm(8), F.relu, L.Convolution2D(8, 1, 3, pad=1))
    )
    x = np.random.randn(1, 1, 64, 64).astype(np.float32)
    report = Split(link, data=(8,)).memory_report(x)
    assert not report.joined
    # The numbers a channel or a sample are some hundred bytes.
    assert sum(report.split.values()) == pytest.approx(8 * 64 * 64 * 4, abs=2000)


@pytest.mark.parametrize("size", [1, 2])
def test_sums_of_half_precision_are_single(size: int) -> None:
    with chainer.using_config("dtype", chainer.mixed16):
        link = L.BatchNormalization(4)
    x = (np.random.RandomState(0).randn(2, 4, 64, 64) + 10).astype(np.float16)
    expected = link(x).array  # the sum of a channel is more than half precision has numbers for
    found = [Split(link, data=(4,))(x).array] if size == 1 else run_ranks(size, _normalised, x)
    for each in found:
        assert each.dtype == np.float16
        np.testing.assert_allclose(each.astype(float), expected.astype(float), atol=5e-3)


def _normalised(comm: collective.Communicator, x: Any) -> Any:
    with chainer.using_config("dtype", chainer.mixed16):
        return Split(L.BatchNormalization(4), data=(comm.size,), comm=comm)(x).array


# -- what is refused -------------------------------------------------------------------------


def test_a_split_within_a_split() -> None:
    link = chainer.Sequential(Split(L.Convolution2D(1, 1, 3)))
    with pytest.raises(collective.UnsupportedError, match=r"/0 is a Split.*in one call"):
        Split(link, data=(2,))


def test_options_that_are_refused() -> None:
    with pytest.raises(collective.InvalidArgumentError, match="positive integers"):
        Split(L.Convolution2D(1, 1, 3), channels=0)


def test_what_is_no_link() -> None:
    with pytest.raises(collective.InvalidArgumentError, match=r"function; a chainer\.Link"):
        Split(F.relu, data=(2,))


def test_functions_elsewhere_are_chainers_own() -> None:
    own = chainer.FunctionNode.apply
    Split(L.Convolution2D(1, 1, 3), data=(2,))(np.ones((1, 1, 8, 8), np.float32))
    assert chainer.FunctionNode.apply is own
