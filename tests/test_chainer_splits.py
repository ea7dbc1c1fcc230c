"""Chainer links computed in pieces, in turn and over ranks: beside test_splits.py."""

from __future__ import annotations

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
from tests.split_models_chainer import UNet, outcome
from tests.test_splits import CLOSE, far

# -- in turn ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"data": (3,)}, {"channels": 2}, {"batch": 2}], ids=str)
def test_dropout_drops_what_the_function_drops(how: dict[str, Any]) -> None:
    with chainer.using_config("dtype", np.float64):
        link = chainer.Sequential(L.Convolution2D(1, 4, 3), F.dropout, L.Convolution2D(4, 1, 3))
    x = np.random.randn(2, 1, 12, 9)
    np.random.seed(3)
    expected = outcome(link, x, link)
    np.random.seed(3)
    assert far(outcome(link, x, Split(link, **how)), expected) < CLOSE


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
    assert far(outcome(link, x, Split(link, data=(4,))), outcome(link, x, link)) < CLOSE


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


def test_what_is_no_link() -> None:
    with pytest.raises(collective.InvalidArgumentError, match=r"function; a chainer\.Link"):
        Split(F.relu, data=(2,))


def test_functions_elsewhere_are_chainers_own() -> None:
    own = chainer.FunctionNode.apply
    Split(L.Convolution2D(1, 1, 3), data=(2,))(np.ones((1, 1, 8, 8), np.float32))
    assert chainer.FunctionNode.apply is own
