"""ChainerMN's differentiable functions and links (its unmodified code) over our transports."""

from __future__ import annotations

from typing import Any

import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.chainermn")

import chainer
import chainermn
import numpy as np
from chainermn import functions

from tests.support.chainer_ranks import EVERYWHERE, FEW, QUIETLY, on

pytestmark = QUIETLY


def variable(rank: int, dtype: str, shape: tuple[int, ...] = (2, 3)) -> Any:
    count = int(np.prod(shape))
    return chainer.Variable(np.asarray((np.arange(count).reshape(shape) + rank) / 8, dtype))


@on(*EVERYWHERE, chainermn=True)
def test_collective_functions_return_values_and_gradients(comm: Any) -> None:
    size, rank = comm.size, comm.rank
    # Transports treat all types alike, so one transport with all types is enough.
    everything = (comm.comm.backend, size) == ("shm", 2)
    for dtype in ("float16", "float32", "float64") if everything else ("float16",):
        with chainer.using_config("dtype", dtype):
            x = variable(rank, dtype)
            ys = functions.allgather(comm, x)
            weighted = sum((k + 1) * (rank + 1) * chainer.functions.sum(y)
                           for k, y in enumerate(ys))  # fmt: skip
            weighted.backward()
            # The sum of the weights that each rank gave to this rank's x.
            expected = (rank + 1) * sum(range(1, size + 1))
            assert np.array_equal(x.grad, np.full((2, 3), expected, dtype))
            for k, y in enumerate(ys):
                assert np.array_equal(y.array, variable(k, dtype).array)

            xs = [variable(rank * size + k, dtype) for k in range(size)]
            ys = functions.alltoall(comm, xs)
            for k, y in enumerate(ys):
                assert np.array_equal(y.array, variable(k * size + rank, dtype).array)
            sum((rank + 1) * chainer.functions.sum(y) for y in ys).backward()
            assert [float(x.grad[0, 0]) for x in xs] == list(range(1, size + 1))

            for root in range(size):
                x = variable(rank, dtype)
                y = functions.bcast(comm, x if rank == root else None, root)
                assert np.array_equal(y.array, variable(root, dtype).array)
                chainer.functions.sum((rank + 1) * y).backward()
                if rank == root:
                    assert (x.grad == sum(range(1, size + 1))).all()

                x = variable(rank, dtype)
                ys = functions.gather(comm, x, root)
                if rank == root:
                    sum((k + 1) * chainer.functions.sum(y) for k, y in enumerate(ys)).backward()
                else:
                    ys.backward()
                assert (x.grad == rank + 1).all()

                xs = [variable(k, dtype) for k in range(size)] if rank == root else None
                y = functions.scatter(comm, xs, root)
                assert np.array_equal(y.array, variable(rank, dtype).array)
                chainer.functions.sum((rank + 1) * y).backward()
                if rank == root:
                    assert [float(x.grad[0, 0]) for x in xs] == list(range(1, size + 1))


@on(*EVERYWHERE, chainermn=True)
def test_send_and_recv_functions_return_values_and_gradients(comm: Any) -> None:
    """Send x once around the ring, and its gradient back."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x = variable(0, "float32")
    if comm.rank == 0:
        sent = functions.send(x * 2, comm, rank=after)
        y = functions.recv(comm, rank=before, delegate_variable=sent)
        assert np.array_equal(y.array, x.array * 2**comm.size)
        chainer.functions.sum(y).backward()
        assert (x.grad == 2**comm.size).all()
    else:
        functions.send(functions.recv(comm, rank=before) * 2, comm, rank=after).backward()
    if comm.rank == 0:
        several = (variable(1, "float64"), variable(2, "float64", ()))
        sent = functions.send(several, comm, rank=1, tag=5)
        (y,) = functions.pseudo_connect(sent, several[0] * 1)
        assert np.array_equal(y.array, several[0].array)
        chainer.functions.sum(y).backward()
        assert (several[0].grad == 4).all()
        assert several[1].grad == 7
    elif comm.rank == 1:
        first, second = functions.recv(comm, rank=0, tag=5, force_tuple=True)
        (chainer.functions.sum(first) * 3 + second * 7).backward()


def linear(seed: int) -> Any:
    link = chainer.links.Linear(3, 3)
    link.W.array[...] = np.random.RandomState(seed).randn(3, 3)
    return link


class Parts(chainermn.MultiNodeChainList):  # type: ignore[misc]
    """Three layers: the first and the last on rank 0, the second on rank 1."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        if comm.rank == 0:
            self.add_link(linear(1), rank_in=None, rank_out=1)
            self.add_link(linear(3), rank_in=1, rank_out=None)
        else:
            self.add_link(linear(2), rank_in=0, rank_out=0)


@on(*EVERYWHERE, chainermn=True)
def test_chain_over_ranks_equals_chain_on_one_rank(comm: Any) -> None:
    if comm.rank > 1:
        return
    x = variable(0, "float32")
    parts = Parts(comm)
    parts.cleargrads()
    whole = chainer.Sequential(linear(1), linear(2), linear(3))
    whole.cleargrads()
    loss = chainer.functions.sum(whole(x) ** 2)
    loss.backward()
    if comm.rank == 0:
        result = chainer.functions.sum(parts(x) ** 2)
        result.backward()
        np.testing.assert_allclose(result.array, loss.array, rtol=1e-5)
        pairs = [(parts[0], whole[0]), (parts[1], whole[2])]
    else:
        parts().backward()
        pairs = [(parts[0], whole[1])]
    for own, reference in pairs:
        np.testing.assert_allclose(own.W.grad, reference.W.grad, rtol=1e-4)


def lstm() -> Any:
    link = chainer.links.NStepLSTM(1, 2, 3, 0)
    rng = np.random.RandomState(4)
    for _, param in sorted(link.namedparams()):
        param.array[...] = rng.randn(*param.shape) / 2
    return link


@on(*FEW, chainermn=True)
def test_recurrent_network_over_ranks_equals_network_on_one_rank(comm: Any) -> None:
    rng = np.random.RandomState(6)
    steps = [[chainer.Variable(rng.randn(4, 2).astype("f"))] for _ in range(2)]
    first, second = lstm(), lstm()
    hy, cy, _ = first(None, None, steps[0])
    hy, _, _ = second(hy, cy, steps[1])
    chainer.functions.sum(hy).backward()
    if comm.rank == 0:
        link = chainermn.links.create_multi_node_n_step_rnn(lstm(), comm, rank_out=1)
        *_, sent = link(steps[0])
        sent.backward()
        reference = first
    elif comm.rank == 1:
        link = chainermn.links.create_multi_node_n_step_rnn(lstm(), comm, rank_in=0)
        result, *_ = link(steps[1])
        np.testing.assert_allclose(result.array, hy.array, rtol=1e-5)
        chainer.functions.sum(result).backward()
        reference = second
    else:
        return
    for (name, own), (_, expected) in zip(
        sorted(link.actual_rnn.namedparams()), sorted(reference.namedparams())
    ):
        np.testing.assert_allclose(own.grad, expected.grad, rtol=1e-4, atol=1e-6, err_msg=name)


@on(*EVERYWHERE, chainermn=True)
def test_batch_normalization_covers_batches_of_all_ranks(comm: Any) -> None:
    rng = np.random.RandomState(7)
    for dtype, tolerance in (("float32", 1e-4), ("float64", 1e-9)):
        joined = rng.randn(4 * comm.size, 3, 2).astype(dtype)
        upstream = rng.randn(*joined.shape).astype(dtype)
        part = slice(4 * comm.rank, 4 * comm.rank + 4)
        reference = chainer.links.BatchNormalization(3, dtype=dtype)
        net = chainer.Sequential(chainer.links.BatchNormalization(3, dtype=dtype))
        spread = chainermn.links.create_mnbn_model(net, comm)
        own = spread[0]
        assert isinstance(own, chainermn.links.MultiNodeBatchNormalization)
        joined_input, own_input = chainer.Variable(joined), chainer.Variable(joined[part])
        expected, result = reference(joined_input), spread(own_input)
        np.testing.assert_allclose(result.array, expected.array[part], rtol=tolerance, atol=1e-5)
        expected.grad, result.grad = upstream, upstream[part]
        expected.backward()
        result.backward()
        np.testing.assert_allclose(
            own_input.grad, joined_input.grad[part], rtol=tolerance, atol=1e-5
        )
        # ChainerMN's gradient is a mean over ranks, and the reference's is a sum over examples.
        np.testing.assert_allclose(
            own.gamma.grad * comm.size, reference.gamma.grad, rtol=tolerance, atol=1e-5
        )
        np.testing.assert_allclose(own.avg_mean, reference.avg_mean, rtol=tolerance, atol=1e-6)
    with pytest.raises(ValueError, match="nccl"):
        chainermn.links.MultiNodeBatchNormalization(3, comm, communication_backend="nccl")
