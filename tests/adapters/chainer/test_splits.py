"""Chainer links computed in pieces, sequentially and over ranks.

training/splits/test_cuts.py has the tests that all frameworks share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.functional")

import chainer
import chainer.functions as F
import chainer.links as L

import collective
from collective.adapters.chainer.splits import Split
from collective.testing import run_ranks
from tests.support.split_frameworks import CLOSE, far
from tests.support.split_models_chainer import outcome

# -- pieces computed sequentially ------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("corners", [True, False])
def test_split_resize_images_equals_whole(mode: str, corners: bool) -> None:
    def resize(x: Any) -> Any:  # Chainer resizes in single precision only
        return F.resize_images(x * x, (15, 23), mode=mode, align_corners=corners)

    link = chainer.Sequential(resize)
    x = np.random.RandomState(1).randn(1, 2, 9, 13).astype(np.float32)
    split = Split(link, data=(4, 3))
    assert far(outcome(link, x, split), outcome(link, x, link)) < 1e-5
    assert not split.joined


def test_split_edge_padding_has_chainer_gradient() -> None:
    link = chainer.Sequential(lambda x: F.pad(F.relu(x), ((0, 0), (0, 0), (2, 1), (1, 1)), "edge"))
    x = np.random.RandomState(1).randn(1, 2, 9, 13)
    assert far(outcome(link, x, Split(link, data=(4,))), outcome(link, x, link)) < CLOSE


def test_array_of_split_variable_is_whole() -> None:
    class Peeking(chainer.Chain):
        def forward(self, x: Any) -> Any:
            return F.relu(x) * float(F.relu(x).array.sum())

    x = np.random.randn(1, 1, 9, 4)
    np.testing.assert_allclose(Split(Peeking(), data=(3,))(x).array, Peeking()(x).array)


# -- memory reports and precision ------------------------------------------------------------


def test_memory_report_counts_kept_activations() -> None:
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
def test_split_normalisation_keeps_only_its_input(norm: Callable[[int], Any]) -> None:
    link = chainer.Sequential(
        *(L.Convolution2D(1, 8, 3, pad=1), norm(8), F.relu, L.Convolution2D(8, 1, 3, pad=1))
    )
    x = np.random.randn(1, 1, 64, 64).astype(np.float32)
    report = Split(link, data=(8,)).memory_report(x)
    assert not report.joined
    # The statistics per channel or sample take some hundred bytes.
    assert sum(report.split.values()) == pytest.approx(8 * 64 * 64 * 4, abs=2000)


@pytest.mark.parametrize("size", [1, 2])
def test_split_half_precision_sums_use_single_precision(size: int) -> None:
    with chainer.using_config("dtype", chainer.mixed16):
        link = L.BatchNormalization(4)
    x = (np.random.RandomState(0).randn(2, 4, 64, 64) + 10).astype(np.float16)
    expected = link(x).array  # the sum over a channel overflows half precision
    outputs = [Split(link, data=(4,))(x).array] if size == 1 else run_ranks(size, _normalised, x)
    for output in outputs:
        assert output.dtype == np.float16
        np.testing.assert_allclose(output.astype(float), expected.astype(float), atol=5e-3)


def _normalised(comm: collective.Communicator, x: Any) -> Any:
    with chainer.using_config("dtype", chainer.mixed16):
        return Split(L.BatchNormalization(4), data=(comm.size,), comm=comm)(x).array


# -- replicas --------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", ["all", "own"])
@pytest.mark.parametrize("change", ["values", "frozen"])
def test_parameters_that_differ_after_split_raise_on_all_ranks(change: str, filters: str) -> None:
    text = {"values": "the values of /1/W differ on rank 1", "frozen": "/1/W is not trained"}
    for told in run_ranks(2, _drifted, change, filters):
        assert text[change] in told


def _drifted(comm: collective.Communicator, change: str, filters: str) -> str:
    link = chainer.Sequential(L.Convolution2D(4, 4, 1), L.Bias(shape=(4, 1, 1)))
    with link[1].init_scope():
        link[1].W = chainer.Parameter(np.ones((1, 4, 1, 1), "f"))
    split = Split(link, channels=2, filters=filters, comm=comm)
    chainer.optimizers.SGD().setup(split)
    x = np.ones((1, 4, 3, 3), np.float32)
    split(x)
    if comm.rank == 1 and change == "values":
        link[1].W.array[...] = 2
    elif comm.rank == 1:
        link[1].disable_update()
    try:
        split(x)
    except collective.MismatchError as error:
        return str(error)
    return "no error"


# -- errors ----------------------------------------------------------------------------------


def test_split_within_split_raises_unsupported_error() -> None:
    link = chainer.Sequential(Split(L.Convolution2D(1, 1, 3)))
    with pytest.raises(collective.UnsupportedError, match=r"/0 is a Split.*in one call"):
        Split(link, data=(2,))


def test_split_of_function_raises_invalid_argument_error() -> None:
    with pytest.raises(
        collective.InvalidArgumentError, match=r"function \(expected a chainer\.Link"
    ):
        Split(F.relu, data=(2,))


def test_split_restores_function_node_apply() -> None:
    own = chainer.FunctionNode.apply
    Split(L.Convolution2D(1, 1, 3), data=(2,))(np.ones((1, 1, 8, 8), np.float32))
    assert chainer.FunctionNode.apply is own
