"""Models of ChainerMN over our transports: parameters, gradients and errors about them."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.chainermn")

import chainer
import chainermn
import numpy as np

from collective.errors import DtypeError, MismatchError, PeerLostError
from collective.testing import RanksFailedError
from tests.support.chainer_ranks import EVERYWHERE, FEW, QUIETLY, as_chainermn, on, run
from tests.support.selection import in_whole

pytestmark = QUIETLY

SHAPES = {"a": (3, 5), "b": (), "c": (0, 2), "d": (70_000,)}


def model(dtype: str = "float32", **shapes: tuple[int, ...]) -> Any:
    """Return a link with one parameter for each name and shape."""
    link = chainer.Link()
    with link.init_scope():
        for name, shape in (shapes or SHAPES).items():
            setattr(link, name, chainer.Parameter(np.zeros(shape, dtype)))
    link.cleargrads()
    return link


def gradient(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    count = int(np.prod(shape, dtype=int))
    return np.asarray(np.arange(count).reshape(shape) % 7 + 4 * rank, dtype)


def mean(size: int, shape: tuple[int, ...], dtype: str) -> Any:
    every = [gradient(rank, shape, "float64") for rank in range(size)]
    return np.asarray(np.mean(every, axis=0), dtype)


@on(*EVERYWHERE, chainermn=True)
def test_multi_node_mean_grad_averages_gradients(comm: Any) -> None:
    for dtype in ("float16", "float32", "float64"):
        link = model(dtype)
        for _ in range(3):  # later steps reuse the communicator's memory
            for param in link.params():
                param.grad = gradient(comm.rank, param.shape, dtype)
            comm.multi_node_mean_grad(link)
            for name, param in link.namedparams():
                assert param.grad.dtype == dtype
                assert np.array_equal(param.grad, mean(comm.size, param.shape, dtype)), name
            # Programs that accumulate gradients over several passes add in place like this.
            link.a.grad += 1
            link.b.grad = None
            comm.multi_node_mean_grad(link)
            assert np.array_equal(link.a.grad, mean(comm.size, link.a.shape, dtype) + 1)
            assert link.b.grad is None
            comm.multi_node_mean_grad(link, zero_fill=True)
            assert link.b.grad.shape == ()
            assert link.b.grad == 0


@on(*FEW, chainermn=True)
def test_mean_grad_only_reads_aliased_and_read_only_arrays(comm: Any) -> None:
    size, rank = comm.size, comm.rank
    link = model(a=(4, 6), b=(4, 6), c=(4, 6), d=(4, 6))
    local = gradient(rank, (4, 6), "float32")
    shared = local.copy()
    link.a.grad = np.asfortranarray(local)
    link.b.grad = np.broadcast_to(np.float32(rank), (4, 6))
    link.b.grad.flags.writeable = False
    link.c.grad = link.d.grad = shared
    comm.multi_node_mean_grad(link)
    expected = mean(size, (4, 6), "float32")
    assert np.array_equal(link.a.grad, expected)
    assert (link.b.grad == (size - 1) / 2).all()
    assert np.array_equal(link.c.grad, expected)
    assert np.array_equal(link.d.grad, expected)
    assert np.array_equal(shared, local)
    # After a step no two parameters share memory for their gradients.
    link.c.grad += 1
    assert np.array_equal(link.d.grad, expected)


@on(*FEW, chainermn=True)
def test_allreduce_grad_dtype_sets_precision_of_mean(comm: Any) -> None:
    link = model("float16", a=(3,))
    link.a.grad = np.array([60_000, -60_000, 1], np.float16)
    comm.multi_node_mean_grad(link)
    assert link.a.grad.tolist() == [60_000, -60_000, 1]
    for dtype, exact in (("float16", False), ("float64", True)):
        comm.set_config("allreduce_grad_dtype", dtype)
        link = model(a=(2,))
        link.a.grad = np.array([2049, 1.0], np.float32)
        comm.multi_node_mean_grad(link)
        assert link.a.grad.dtype == np.float32
        assert link.a.grad.tolist() == [2049 if exact else 2048, 1]


@on(*FEW, chainermn=True)
def test_multi_node_mean_grad_separates_memory_of_two_models(comm: Any) -> None:
    one, other = model(a=(3,)), model(a=(3,))
    for step in range(3):
        one.a.grad = np.full(3, comm.rank + step, "f")
        other.a.grad = np.full(3, 10 * comm.rank, "f")
        comm.multi_node_mean_grad(one)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            comm.allreduce_grad(other)
        assert (one.a.grad == (comm.size - 1) / 2 + step).all()
        assert (other.a.grad == 5 * (comm.size - 1)).all()


@on(*FEW, chainermn=True)
def test_multi_node_mean_grad_includes_later_initialised_parameters(comm: Any) -> None:
    link = chainer.Sequential(chainer.links.Linear(None, 2), chainer.links.Linear(2, 2))
    link[1].cleargrads()
    link[1].W.grad = np.full((2, 2), comm.rank, "f")
    comm.multi_node_mean_grad(link)
    assert (link[1].W.grad == (comm.size - 1) / 2).all()
    link(np.zeros((1, 3), "f"))
    link.cleargrads()
    link[0].W.grad = np.full((2, 3), comm.rank, "f")
    comm.multi_node_mean_grad(link)
    assert (link[0].W.grad == (comm.size - 1) / 2).all()
    assert link[1].W.grad is None


@on(*EVERYWHERE, chainermn=True)
def test_bcast_data_copies_parameters_of_rank_0(comm: Any) -> None:
    link = model("float16", a=(3, 4), b=(), c=(2,))
    late = chainer.Parameter()
    with link.init_scope():
        link.late = late
    link.a.array = np.asfortranarray(np.full((3, 4), comm.rank + 1, np.float16))
    link.b.array = np.asarray(np.float16(comm.rank + 2))
    frozen = np.full(2, comm.rank + 3, np.float16)
    frozen.flags.writeable = False
    link.c.array = frozen
    kept = link.a.array
    comm.bcast_data(link)
    assert link.a.array is kept
    for param, value in ((link.a, 1), (link.b, 2), (link.c, 3)):
        assert (param.array == value).all()
    assert frozen.tolist() == [comm.rank + 3] * 2
    assert late.array is None
    link.a.array[...] = comm.rank
    comm.broadcast_data(link)
    assert not link.a.array.any()


@on("shm-2", chainermn=True)
def test_bcast_data_keeps_tied_parameter_tied(comm: Any) -> None:
    link = model(a=(2,))
    link.a.array[...] = comm.rank + 1
    with link.init_scope():
        link.tied = link.a
    comm.bcast_data(link)
    assert (link.a.array == 1).all()
    assert link.tied.array is link.a.array


@on("shm-4", chainermn=True)
def test_multi_node_mean_averages_arrays(comm: Any) -> None:
    half = (comm.size - 1) / 2
    for dtype in ("float16", "float32", "float64"):
        x = np.full((3, 4), comm.rank, dtype)
        comm._multi_node_mean(None, x.T[1:])
        assert (x[:, 1:] == half).all()
        assert (x[:, 0] == comm.rank).all()
        out = np.zeros(2, dtype)
        comm._multi_node_mean(np.full(2, comm.rank, dtype), out)
        assert (out == half).all()
    with pytest.raises(DtypeError):
        comm._multi_node_mean(None, np.zeros(2, int))
    with chainer.using_config("debug", True), pytest.raises(ValueError, match="not finite"):
        comm._multi_node_mean(None, np.array([1.0, np.nan if comm.rank else 1.0]))


# -- errors ---------------------------------------------------------------------------------


@on("shm-2", "gloo-2", "threads-2", chainermn=True)
def test_gradient_missing_on_rank_is_named_on_all_ranks(comm: Any) -> None:
    link = model(a=(2,), b=(2,), c=(2,))

    def fill(absent: str | None) -> dict[str, Any]:
        link.cleargrads()
        for name, param in link.namedparams():
            if name != absent:
                param.grad = np.full(2, comm.rank + 1, "f")
        return {name: param.grad for name, param in link.namedparams()}

    # Each rank contributes equally many elements, but of different parameters.
    gradients = fill("/" + "abc"[comm.rank])
    with pytest.raises(MismatchError, match="zero_fill=True") as caught:
        comm.multi_node_mean_grad(link)
    for rank in range(comm.size):
        assert f"rank {rank}: None for /{'abc'[rank]}\n" in str(caught.value)
    for name, param in link.namedparams():
        assert param.grad is gradients[name]
        assert gradients[name] is None or gradients[name].tolist() == [comm.rank + 1] * 2
    fill("/a" if comm.rank == 1 else None)
    with pytest.raises(MismatchError, match=r"0: None for no parameter\n  rank 1: None for /a\n"):
        comm.multi_node_mean_grad(link)
    comm.multi_node_mean_grad(link, zero_fill=True)
    total = comm.size * (comm.size + 1) / 2
    assert link.a.grad.tolist() == [(total - 2) / comm.size] * 2
    assert link.b.grad.tolist() == [total / comm.size] * 2
    link.cleargrads()
    with pytest.raises(MismatchError, match="rank 0: zero_fill=True"):
        comm.multi_node_mean_grad(link, zero_fill=comm.rank == 0)


@on("shm-2", "threads-2", chainermn=True)
def test_different_models_raise_mismatch_error_on_all_ranks(comm: Any) -> None:
    link = model(a=(2, 2 + comm.rank), b=(3,))
    link.zerograds()
    with pytest.raises(
        MismatchError, match=r"/a is float32\[2, 3\] on rank 1, but float32\[2, 2\] on rank 0"
    ):
        comm.multi_node_mean_grad(link)
    with pytest.raises(MismatchError, match=r"2, 2.*\n.*2, 3"):
        comm.bcast_data(link)
    # A parameter that is added on one rank only changes the memory layout of that rank.
    link = model(a=(2,))
    link.zerograds()
    comm.multi_node_mean_grad(link)
    if comm.rank:
        with link.init_scope():
            link.b = chainer.Parameter(np.zeros(2, "f"))
    with pytest.raises(
        MismatchError, match="of rank 1 are not those of rank 0: only rank 1 has /b"
    ):
        comm.multi_node_mean_grad(link)
    assert comm.allreduce_obj(1) == comm.size


@pytest.mark.parametrize("change", ["value", "frozen"])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_replicas_that_drift_apart_raise_on_all_ranks(change: str, double_buffering: bool) -> None:
    run("shm-2", as_chainermn, drifting, change, double_buffering, shared=True)


def drifting(comm: Any, change: str, double_buffering: bool) -> None:
    link = model(a=(2,), b=(3,))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, double_buffering=double_buffering
    ).setup(link)

    def steps(count: int) -> None:
        for _ in range(count):
            link.zerograds()
            optimizer.update()

    steps(4)
    if comm.rank and change == "value":
        link.b.array[...] = 5
    elif comm.rank:
        link.b.update_rule.enabled = False
    text = {"value": "the values of /b differ on rank 1", "frozen": "/b is not trained"}[change]
    with pytest.raises(MismatchError, match=text):
        steps(1 + double_buffering)


@on("shm-2", chainermn=True)
def test_parameter_added_on_one_rank_is_named_by_that_rank(comm: Any) -> None:
    link = model(a=(2,))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(link)
    for _ in range(2):
        link.zerograds()
        optimizer.update()
    if comm.rank:
        with link.init_scope():
            link.b = chainer.Parameter(np.zeros(2, "f"))
    link.zerograds()
    with pytest.raises(MismatchError) as caught:
        optimizer.update()
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("/b was added" in notes) == (comm.rank == 1)


@on("shm-2", chainermn=True)
def test_models_that_were_never_equal_may_differ(comm: Any) -> None:
    link = model(a=(2,))
    for step in range(3):
        link.a.array[...] = comm.rank + step
        link.a.grad = np.full(2, comm.rank, "f")
        comm.multi_node_mean_grad(link)
        assert link.a.grad.tolist() == [0.5] * 2


@on("shm-2", chainermn=True)
def test_debug_mode_reports_non_finite_gradient_on_all_ranks(comm: Any) -> None:
    link = model(a=(2,), b=(2,))
    for debug in (False, True):
        link.a.grad = np.zeros(2, "f")
        link.b.grad = np.array([0, np.inf if comm.rank else 0], "f")
        with chainer.using_config("debug", debug):
            if debug:
                with pytest.raises(ValueError, match="not finite, of /b "):
                    comm.multi_node_mean_grad(link)
            else:
                comm.multi_node_mean_grad(link)


def die_in_the_middle(comm: Any) -> None:
    link = model()
    link.zerograds()

    def steps() -> None:
        comm.multi_node_mean_grad(link)
        if comm.rank == 1:
            # When rank 1 dies, another rank may be inside this all-reduce, before it, or still in
            # the first one.
            comm.comm.all_reduce = lambda *args, **kwargs: os._exit(7)
        comm.multi_node_mean_grad(link)

    with pytest.raises(PeerLostError, match="rank 1") as caught:
        steps()
    assert caught.value.ranks == (1,)
    with pytest.raises(PeerLostError, match="rank 1"):
        comm.bcast_data(link)


@pytest.mark.parametrize("world", ["shm-4", in_whole("gloo-2")])
def test_rank_death_in_step_is_named_on_other_ranks(world: str) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run(world, as_chainermn, die_in_the_middle)
    assert sorted(caught.value.errors) == [1]


def fail_in_the_middle(comm: Any) -> None:
    link = model()
    link.zerograds()
    comm.multi_node_mean_grad(link)
    if comm.rank == 0:
        link.a.grad = None
        raise KeyError("a step of rank 0")
    comm.multi_node_mean_grad(link)


def test_rank_error_in_step_ends_other_ranks() -> None:
    with pytest.raises(RanksFailedError, match="a step of rank 0") as caught:
        run("threads-2", as_chainermn, fail_in_the_middle)
    assert sorted(caught.value.errors) == [0, 1]


# -- double buffering -------------------------------------------------------------------------


class Quadratic(chainer.Link):  # type: ignore[misc]
    """A loss whose gradient is the parameter minus the target."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.array([1.0, 2.0]))
            self.unused = chainer.Parameter(np.zeros(2))

    def forward(self, target: Any) -> Any:
        return chainer.functions.sum((self.w - target) ** 2) / 2


@on(*EVERYWHERE, chainermn=True)
def test_double_buffering_applies_mean_one_step_late(comm: Any) -> None:
    link = Quadratic()
    link.w.array += comm.rank
    plain = chainer.optimizers.SGD(0.5)
    optimizer = chainermn.create_multi_node_optimizer(plain, comm, double_buffering=True)
    assert optimizer.setup(link) is optimizer
    targets = np.random.RandomState(3).randn(7, comm.size, 2)
    w, late = np.array([1.0, 2.0]), None
    for step, of_all in enumerate(targets):
        optimizer.update(link, of_all[comm.rank])
        if step == 0:  # the first update only copies rank 0's parameters to all ranks
            expected = w
        else:
            # The next step applies the mean gradient of this step, taken at this step's parameters.
            current = (w - of_all).mean(axis=0)
            expected = w if late is None else w - 0.5 * late
            late, w = current, expected
        np.testing.assert_allclose(link.w.array, expected, rtol=1e-14)
        assert not link.unused.array.any()
    assert plain.t == len(targets) - 2
    optimizer.lr = 0.25
    assert plain.lr == 0.25
    # After a parameter is added, its value is broadcast and the mean in flight is dropped.
    with link.init_scope():
        link.more = chainer.Parameter(np.full(2, comm.rank, "f"))
    optimizer.update(link, targets[0][comm.rank])
    assert not link.more.array.any()
    np.testing.assert_allclose(link.w.array, expected, rtol=1e-14)
    for _ in range(3):
        optimizer.update(link, targets[0][comm.rank])
    assert len(set(map(tuple, comm.allgather(link.w.array)))) == 1
