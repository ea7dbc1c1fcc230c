"""Batch normalisation over all ranks' batches, against Chainer's over the joined batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.batch_normalization")

import chainer
import chainer.functions as F
import chainer.links as L

import collective
from collective.adapters.chainer import SyncBatchNormalization, convert_batch_normalization
from collective.errors import InvalidArgumentError, MismatchError, ShapeError
from tests.support.chainer_ranks import on, run

SHAPES: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "rows": ((3,), 3, None),
    "images": ((3, 4, 5), 3, None),
    "every pixel": ((3, 4, 5), (3, 4, 5), None),
    "lazy, channels last": ((4, 5, 3), None, (0, 1, 2)),
}


def inputs(size: int, shape: tuple[int, ...], dtype: str) -> tuple[list[Any], list[Any]]:
    """Return each rank's batch and the gradients of its output.

    The batches have different lengths, and one of four is empty.
    """
    draw = np.random.RandomState(7).standard_normal
    counts = [5, 2, 0, 7][:size]
    x = [(draw((n, *shape)) * 3 + 100).astype(dtype) for n in counts]
    return x, [draw((n, *shape)).astype(dtype) for n in counts]


def made(size: Any, axis: Any, dtype: str, comm: Any = None) -> Any:
    options: dict[str, Any] = {"axis": axis, "decay": 0.8}
    with chainer.using_config("dtype", np.dtype(dtype)):
        if comm is None:
            link = L.BatchNormalization(size, **options)
        else:
            link = SyncBatchNormalization(size, comm, **options)
        if size is not None:
            fill(link)
    return link


def fill(link: Any) -> None:
    link.gamma.array[...] = np.linspace(0.5, 1.5, link.gamma.size).reshape(link.gamma.shape)
    link.beta.array[...] = np.linspace(-1, 1, link.beta.size).reshape(link.beta.shape)


def results(link: Any, x: Any, gy: Any, **options: Any) -> dict[str, Any]:
    x = chainer.Variable(x)
    y = link(x, **options)
    link.cleargrads()
    y.grad = gy
    y.backward()
    return {
        "y": y.array,
        "gx": x.grad,
        "ggamma": link.gamma.grad,
        "gbeta": link.beta.grad,
        "mean": np.array(link.avg_mean),
        "var": np.array(link.avg_var),
        "N": link.N,
    }


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("world", ["threads-2", "shm-4"])
def test_sync_batch_norm_equals_joined_batch(world: str, name: str, finetune: bool) -> None:
    compare(run(world, joined, name, "float64", finetune), name, finetune)


def compare(ranks: list[Any], name: str, finetune: bool) -> None:
    """Compare what :func:`joined` returned on each rank with the joined batch on one process."""
    shape, size, axis = SHAPES[name]
    x, gy = inputs(len(ranks), shape, "float64")
    link = made(size, axis, "float64")
    for _ in range(2):
        expected = results(link, np.concatenate(x), np.concatenate(gy), finetune=finetune)
    for key in ("y", "gx"):
        parts = np.concatenate([rank[key] for rank in ranks])
        np.testing.assert_allclose(parts, expected[key], rtol=1e-9, atol=1e-9, err_msg=key)
    for key in ("ggamma", "gbeta"):
        np.testing.assert_allclose(
            sum(rank[key] for rank in ranks), expected[key], rtol=1e-9, atol=1e-9, err_msg=key
        )
    for rank in ranks:
        for key in ("mean", "var", "N"):
            np.testing.assert_allclose(rank[key], expected[key], rtol=1e-12, err_msg=key)
            assert np.array_equal(rank[key], ranks[0][key]), "ranks differ"


def joined(comm: Any, name: str, dtype: str, finetune: bool) -> Any:
    shape, size, axis = SHAPES[name]
    x, gy = (batches[comm.rank] for batches in inputs(comm.size, shape, dtype))
    link = made(size, axis, dtype, comm)
    results(link, x, gy, finetune=finetune)
    return results(link, x, gy, finetune=finetune)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 2e-2)])
def test_sync_batch_norm_in_lower_precision_is_close(dtype: str, tolerance: float) -> None:
    # The inputs are far from zero: a variance computed as a difference of squares would be mere
    # rounding error.
    ranks = run("threads-2", half, dtype)
    x, gy = (np.concatenate(batches) for batches in inputs(2, (3, 4, 5), dtype))
    expected = results(made(3, None, "float64"), x.astype("f8"), gy.astype("f8"))
    for key in ("y", "gx"):
        parts = np.concatenate([batches[key] for batches in ranks])
        assert parts.dtype == dtype
        np.testing.assert_allclose(parts, expected[key], rtol=tolerance, atol=tolerance)


def half(comm: Any, dtype: str) -> Any:
    x, gy = (batches[comm.rank] for batches in inputs(2, (3, 4, 5), dtype))
    return results(made(3, None, "float32", comm), x, gy)


@on("threads-2")
def test_sync_batch_norm_evaluation_needs_no_other_rank(comm: Any) -> None:
    link = made(3, None, "float32", comm)
    x = inputs(2, (3,), "float32")[0][0]
    if comm.rank == 0:
        expected = L.BatchNormalization(3)
        fill(expected)
        with chainer.using_config("train", False):
            np.testing.assert_allclose(link(x).array, expected(x).array, rtol=1e-6)


@on("threads-2")
def test_sync_batch_norm_backward_without_gradient_on_rank_completes(comm: Any) -> None:
    link = SyncBatchNormalization(3, comm, use_gamma=False, use_beta=False)
    x, gy = (batches[comm.rank] for batches in inputs(2, (3,), "float32"))
    x = chainer.Variable(x, requires_grad=comm.rank == 0)
    y = link(x)
    y.grad = gy
    y.backward()
    assert (x.grad is None) == (comm.rank == 1)


def test_convert_batch_normalization_converts_in_place() -> None:
    outputs = run("threads-2", converted)
    x, _ = inputs(2, (6,), "float32")
    model = Net()
    model.cleargrads()
    expected = model(np.concatenate(x)).array
    np.testing.assert_allclose(np.concatenate(outputs), expected, rtol=1e-4, atol=1e-4)


class Net(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        draw = np.random.RandomState(2).standard_normal((4, 6)).astype("f")
        with self.init_scope():
            self.body = chainer.Sequential(L.Linear(6, 4, initialW=draw), L.BatchNormalization(4))
            self.tail = L.BatchNormalization(4)
            self.again = self.tail

    def forward(self, x: Any) -> Any:
        return self.again(F.relu(self.tail(self.body(x))))


def converted(comm: Any) -> Any:
    model = Net()
    names = dict(model.namedparams())
    optimizer = chainer.optimizers.Adam().setup(model)
    before = chainer.serializers.npz.serialize(model).keys()
    assert convert_batch_normalization(model, comm) is model
    kinds = [type(link) for link in model.links() if isinstance(link, L.BatchNormalization)]
    assert set(kinds) == {SyncBatchNormalization}
    assert model.again is model.tail
    assert all(parameter is names[name] for name, parameter in model.namedparams())
    assert chainer.serializers.npz.serialize(model).keys() == before
    assert optimizer.target is model
    assert copy.deepcopy(model).tail.comm is comm
    return model(inputs(2, (6,), "float32")[0][comm.rank]).array


class Own(L.BatchNormalization):
    pass


def test_sync_batch_norm_misuse_raises() -> None:
    with collective.init() as comm:
        model = chainer.Sequential(L.BatchNormalization(3), Own(3))
        with pytest.raises(InvalidArgumentError, match=r"/1 \(Own\): only L.BatchNormalization"):
            convert_batch_normalization(model, comm)
        assert type(model[0]) is L.BatchNormalization
        link = SyncBatchNormalization(3, comm)
        with pytest.raises(ShapeError, match=r"an input of shape \(2, 4\)"):
            link(np.zeros((2, 4), "f"))
        with pytest.raises(InvalidArgumentError, match="cannot be pickled"):
            pickle.dumps(link)
        y = link(chainer.Variable(np.ones((2, 3), "f")))
        with pytest.raises(InvalidArgumentError, match="no second derivatives"):
            F.sum(y).backward(enable_double_backprop=True)


@on("threads-2")
def test_sync_batch_norm_of_different_sizes_raises_mismatch_error(comm: Any) -> None:
    with pytest.raises(MismatchError):
        SyncBatchNormalization(3 + comm.rank, comm)(np.ones((2, 3 + comm.rank), "f"))
