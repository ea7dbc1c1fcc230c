"""Calls of a ChainerMN communicator over our transports: results, and arguments that raise."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.chainermn")

import chainer
import chainermn
import numpy as np

from collective.adapters.chainer.chainermn import CollectiveCommunicator
from collective.adapters.chainer.chainermn.arrays import MessageMismatchError, MessageTypeError
from collective.errors import InvalidArgumentError, MismatchError, PeerFailedError
from collective.testing import RanksFailedError
from tests.support.chainer_ranks import EVERYWHERE, QUIETLY, as_chainermn, on, run

pytestmark = QUIETLY

DTYPES = ("int32", "int64", "float16", "float32", "float64")


def array(rank: int, dtype: str, ndim: int | None = None) -> Any:
    """Return an array whose shape, strides and number of dimensions depend on the rank."""
    shape = (3, rank + 2, 2)[: rank % 4 if ndim is None else ndim]
    count = int(np.prod(shape, dtype=int))
    counted = np.arange(count).reshape(shape[::-1]).T.astype(dtype)
    return np.asarray(counted + np.asarray(rank, dtype))


def same(result: Any, expected: Any) -> None:
    assert isinstance(result, np.ndarray)
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(result, expected)


@on(*EVERYWHERE, chainermn=True)
def test_array_collectives_handle_every_dtype_and_uneven_shapes(comm: Any) -> None:
    # Transports treat all types alike, so only one transport runs with all types.
    everything = (comm.comm.backend, comm.size) == ("shm", 2)
    for dtype in DTYPES if everything else ("float16", "int64"):
        every = [array(rank, dtype) for rank in range(comm.size)]
        own = every[comm.rank]
        for result, expected in zip(comm.allgather(own), every):
            same(result, expected)
        for root in range(comm.size):
            gathered = comm.gather(own, root)
            assert (gathered is not None) == (comm.rank == root)
            for result, expected in zip(gathered or (), every):
                same(result, expected)
            if comm.rank == root:
                assert comm.bcast(own, root) is own
                same(comm.scatter(tuple(every), root), own)
                assert np.array_equal(comm.scatter(np.arange(comm.size).astype(dtype), root), root)
            else:
                same(comm.bcast(None, root), every[root])
                same(comm.scatter("ignored", root), own)
                assert comm.scatter(None, root) == np.asarray(comm.rank, dtype)
        sent = [array(comm.rank + other, dtype) for other in range(comm.size)]
        received = comm.alltoall(tuple(sent))
        assert isinstance(received, tuple)
        for other, result in enumerate(received):
            same(result, array(comm.rank + other, dtype))
        total = comm.allreduce(array(1, dtype, 2) * np.asarray(comm.rank + 1, dtype))
        same(total, array(1, dtype, 2) * np.asarray(sum(range(1, comm.size + 1)), dtype))
    same(comm.allreduce(np.array(2.0)), np.array(2.0 * comm.size))
    same(comm.allgather(np.float32(comm.rank))[-1], np.array(comm.size - 1, np.float32))


@on(*EVERYWHERE, chainermn=True)
def test_send_and_recv_carry_single_array_and_tuple(comm: Any) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype in DTYPES:
        for sent in (array(2, dtype), (array(1, dtype), array(3, dtype)), [array(0, dtype)]):
            if comm.rank == 0:
                comm.send(sent, after, 7)
                received = comm.recv(before, 7)
            else:
                received = comm.recv(before, 7)
                comm.send(received, after, 7)
            assert isinstance(received, np.ndarray if isinstance(sent, np.ndarray) else tuple)
            if isinstance(sent, np.ndarray):
                sent, received = [sent], [received]
            assert len(received) == len(sent)
            for a, b in zip(received, sent):
                same(a, b)


@on(*EVERYWHERE, chainermn=True)
def test_object_collectives_return_equal_objects(comm: Any) -> None:
    data = chainer.datasets.TupleDataset(np.arange(4), ["a", "b", "c", "d"])
    assert comm.bcast_obj(None) is None
    assert comm.bcast_obj("mine" if comm.rank else None) is None
    root = comm.size - 1
    dataset = comm.bcast_obj(data if comm.rank == root else None, max_buf_len=1, root=root)
    assert dataset[3] == (3, "d")
    assert comm.allreduce_obj([comm.rank]) == list(range(comm.size))
    gathered = comm.gather_obj({comm.rank}, root=root)
    assert gathered == ([{rank} for rank in range(comm.size)] if comm.rank == root else None)


class Status:
    """The attributes of an ``MPI.Status`` that ``recv_obj`` sets."""

    source = tag = -5


@on("shm-2", chainermn=True)
def test_recv_obj_selects_by_tag_in_order_of_sending(comm: Any) -> None:
    # Only shm: on threads and gloo a sender waits for its receiver. This receiver asks in a
    # different order, so both ranks would wait.
    if comm.rank == 0:
        for tag, letter in ((3, "first"), (9, "second"), (0, "third"), (9, None)):
            comm.send_obj(letter, 1, tag=tag)
    elif comm.rank == 1:
        status = Status()
        # Other messages stay queued and arrive in the order of sending.
        assert comm.recv_obj(0, tag=9) == "second"
        assert comm.recv_obj(0, status) == "first"
        assert (status.source, status.tag) == (0, 3)
        assert comm.recv_obj(0) == "third"
        assert comm.recv_obj(0, tag=9) is None
    # A receive of an object does not match an array that has the same tag.
    if comm.rank == 0:
        comm.send(np.arange(2), 1, 4)
        comm.send_obj("object", 1, tag=4)
    elif comm.rank == 1:
        assert comm.recv_obj(0, tag=4) == "object"
        assert comm.recv(0, 4).tolist() == [0, 1]


@on("shm-4", chainermn=True)
def test_recv_obj_from_any_source_sets_status(comm: Any) -> None:
    if comm.rank:
        comm.send_obj(comm.rank, 0)
    else:
        status, sources = Status(), set()
        for _ in range(1, comm.size):
            sources.add(comm.recv_obj(-1, status))
            assert status.source in sources
        assert sources == set(range(1, comm.size))


@on("shm-2", chainermn=True)
def test_object_calls_without_pickle_refuse_pickled_objects(comm: Any) -> None:
    comm.set_config("pickle", False)
    assert comm.bcast_obj({"a": (1, np.arange(3))})["a"][0] == 1
    with pytest.raises(InvalidArgumentError, match="neither plain data nor an array"):
        comm.gather_obj(chainer.datasets.TupleDataset([1], [2]))
    # A rank with pickle=False does not read a pickle from a rank with pickle=True.
    comm.set_config("pickle", comm.rank == 0)
    if comm.rank == 0:
        comm.bcast_obj([1])
    else:
        with pytest.raises(InvalidArgumentError, match="was not read"):
            comm.bcast_obj(None)


@on("shm-2", chainermn=True)
def test_bad_arguments_raise_before_communication(comm: Any) -> None:
    x = np.ones(2, "f")
    for argument in (chainer.Variable(x), [1.0, 2.0], "text", 3.0, None):
        for call in (comm.allreduce, comm.allgather, comm.gather):
            with pytest.raises(TypeError, match="NumPy or CuPy"):
                call(argument)
    for dtype in ("int8", "uint8", "int16", "complex64", "bool"):
        with pytest.raises(TypeError, match=f"does not support dtype {dtype}"):
            comm.allreduce(x.astype(dtype))
        with pytest.raises(TypeError, match=f"does not support dtype {dtype}"):
            comm.send((x, x.astype(dtype)), 0, 0)
    for call in (comm.allreduce, comm.allgather, comm.gather):
        with pytest.raises(TypeError):
            call((x, x))
    with pytest.raises(MessageTypeError, match="float32, float64"):
        comm.alltoall((x, *[x.astype("d")] * (comm.size - 1)))
    with pytest.raises(ValueError, match=f"{comm.size + 1} arrays for {comm.size} ranks"):
        comm.alltoall((x,) * (comm.size + 1))
    with pytest.raises(ValueError, match="reserved for objects"):
        comm.send(x, 0, 2**31 - 1)
    if comm.rank == 0:
        for argument in ((x,), np.ones((comm.size + 1, 2), "f"), np.array(1.0)):
            with pytest.raises(ValueError, match="scatter"):
                comm.scatter(argument)
        with pytest.raises(TypeError, match="a tuple of arrays"):
            comm.bcast((x, x))
        with pytest.raises(ValueError, match="no arrays"):
            comm.send((), 1, 0)
    assert comm.allreduce(x).tolist() == [comm.size] * 2


@on("shm-2", "threads-2", chainermn=True)
def test_calls_with_different_dtypes_raise_on_all_ranks(comm: Any) -> None:
    x = np.ones(2, "d" if comm.rank else "f")
    for call in (comm.allgather, comm.gather, lambda x: comm.alltoall((x,) * comm.size)):
        with pytest.raises(MessageMismatchError, match="rank 0 float32, rank 1 float64") as caught:
            call(x)
        assert isinstance(caught.value, TypeError)
    with pytest.raises(MismatchError, match=r"float32.*\n.*float64"):
        comm.allreduce(x)
    with pytest.raises(MismatchError, match=r"\[1\].*\n.*\[2\]"):
        comm.allreduce(np.ones(comm.rank + 1))
    assert comm.allreduce_obj(1) == comm.size


def raise_on_one(comm: Any) -> None:
    if comm.rank == 0:
        comm.bcast(chainer.Variable(np.ones(2)))
    else:
        with pytest.raises(PeerFailedError, match=r"a Variable \(expected an array"):
            comm.bcast(None)


def test_bcast_error_on_root_raises_on_waiting_ranks() -> None:
    with pytest.raises(RanksFailedError, match="a Variable") as caught:
        run("shm-2", as_chainermn, raise_on_one)
    assert sorted(caught.value.errors) == [0]


@on("shm-2", chainermn=True)
def test_set_config_applies_to_one_communicator(comm: Any) -> None:
    base = chainermn.CommunicatorBase
    other = comm.split(0, comm.rank)
    comm.set_config("allreduce_grad_dtype", np.float16)
    assert comm.get_config("allreduce_grad_dtype") == np.float16
    assert other.get_config("allreduce_grad_dtype") is None
    assert base._configs == {}
    comm.set_config("batched_copy")
    assert comm.get_config("batched_copy") is True
    with comm.config_scope():
        assert comm.within_config_scope
        comm.own_setting = 5
    assert not comm.within_config_scope
    comm.not_a_setting = 6
    assert comm.get_config("own_setting") == comm.own_setting == 5
    assert set(comm.get_config()) == {
        "allreduce_grad_dtype", "batched_copy", "own_setting", "pickle",
    }  # fmt: skip
    assert comm.split(0, comm.rank).get_config() == comm.get_config()
    for call in (comm.set_config, comm.get_config):
        with pytest.raises(ValueError, match="Unknown config: no_such"):
            call("no_such")
    with pytest.raises(ValueError, match="float16, float32, float64 or None"):
        comm.set_config("allreduce_grad_dtype", np.int32)
    assert comm.get_config("allreduce_grad_dtype") == np.float16


@on("shm-4", chainermn=True)
def test_split_ranks_and_finalize_follow_chainermn(comm: Any) -> None:
    half = comm.split(comm.rank % 2, -comm.rank)
    assert isinstance(half, CollectiveCommunicator)
    assert half.size == comm.size // 2
    assert half.allreduce_obj([comm.rank]) == [3, 1] if comm.rank % 2 else [2, 0]
    assert comm.split(None if comm.rank else 0, 0) is None or comm.rank == 0
    half.finalize()
    half.finalize()
    assert copy.deepcopy({"comm": comm})["comm"] is comm
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(comm)
    comm.finalize()
    # The test passed comm.comm in, so finalize() leaves it open.
    assert not comm.comm.closed
    assert (comm.rank, comm.size) == (comm.intra_rank, comm.intra_size) == (comm.comm.rank, 4)
    assert (comm.inter_rank, comm.inter_size) == (0, 1)


@on("shm-2", chainermn=True)
def test_mpi_comm_without_mpi_carries_objects(comm: Any) -> None:
    mpi_comm = comm.mpi_comm
    here, other = comm.rank, 1 - comm.rank
    assert (mpi_comm.rank, mpi_comm.size) == (here, 2)
    assert (mpi_comm.Get_rank(), mpi_comm.Get_size()) == (here, 2)
    mpi_comm.Barrier()
    mpi_comm.barrier()
    assert mpi_comm.bcast({1} if here == 1 else None, root=1) == {1}
    assert mpi_comm.gather(-here) == ([0, -1] if here == 0 else None)
    assert mpi_comm.allgather({here}) == [{0}, {1}]
    assert mpi_comm.scatter(["a", "b"] if here == 0 else None) == "ab"[here]
    # mpi_comm and the communicator share messages: one may send and the other receive.
    if here == 0:
        mpi_comm.send({here}, other, tag=3)
        assert comm.recv_obj(other) == "own"
    else:
        status = SimpleNamespace()
        assert mpi_comm.recv(source=other, status=status) == {0}
        assert (status.source, status.tag) == (0, 3)
        comm.send_obj("own", other)
    with pytest.raises(
        AttributeError, match=r"mpi_comm\.Alltoallv: over 'shm' mpi_comm has Barrier"
    ):
        mpi_comm.Alltoallv()
    assert not hasattr(mpi_comm, "Split")
    # The communicator's `pickle` setting also applies to mpi_comm.
    comm.set_config("pickle", False)
    with pytest.raises(InvalidArgumentError, match="pickle"):
        mpi_comm.allgather(SimpleNamespace())


def test_communicator_implements_every_chainermn_method() -> None:
    base = chainermn.CommunicatorBase
    assert not CollectiveCommunicator.__abstractmethods__
    inherited = {
        name
        for name in dir(base)
        if not name.startswith("_") and getattr(CollectiveCommunicator, name) is getattr(base, name)
    }
    # These methods of the base class call the methods that are overridden.
    assert inherited == {"allreduce_grad", "broadcast_data", "config_scope", "within_config_scope"}
