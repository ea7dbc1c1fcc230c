"""Copies of objects that hold a communicator: they share it, or the copy raises an error.

The error recommends what to copy or save instead.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collective import gradients
from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from tests.support.on_ranks import on_ranks, ranks_of

two = ranks_of(("threads", 2), ("shm", 2))


def _sharded(comm: Communicator) -> Any:
    torch = pytest.importorskip("torch")
    from collective.adapters.torch import ShardedOptimizer

    return ShardedOptimizer(torch.nn.Linear(3, 2).parameters(), torch.optim.SGD, comm, lr=0.1)


def _link() -> Any:
    adapter = pytest.importorskip("collective.adapters.chainer")
    import chainer

    return adapter, chainer, chainer.links.Linear(3, 2)


def _multi_node(comm: Communicator) -> Any:
    adapter, chainer, link = _link()
    return adapter.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(link)


def _pipeline(comm: Communicator) -> Any:
    adapter, _, link = _link()
    stages = [copy.deepcopy(link) for _ in range(comm.size)]
    return adapter.Pipeline(stages, comm, microbatches=2)


def _replicas(comm: Communicator) -> Any:
    adapter, _, link = _link()
    return adapter.Replicas(link, ["@numpy", "@numpy"])


REFUSING: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "work": (lambda comm: comm.all_reduce(np.ones(3), async_op=True), "what wait"),
    "gradients": (
        lambda comm: gradients.Gradients(comm, [gradients.Parameter("w", (3,), "float32")]),
        "for the parameters of the copy",
    ),
    "sharded optimizer": (_sharded, "state_dict"),
    "multi-node optimizer": (_multi_node, "create_multi_node_optimizer"),
    "pipeline": (_pipeline, "stage"),
    "replicas": (_replicas, "first link"),
}


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("name", REFUSING)
@on_ranks("two")
def test_copy_of_process_bound_object_raises_invalid_argument(
    comm: Communicator, name: str, way: Callable[[Any], Any]
) -> None:
    make, remedy = REFUSING[name]
    original = make(comm)
    with pytest.raises(InvalidArgumentError, match=f"neither copied nor pickled.*{remedy}"):
        way(original)
    comm.barrier()


@on_ranks("two")
def test_communicator_is_shared_by_deep_copy_of_container(comm: Communicator) -> None:
    assert copy.deepcopy({"comm": comm, "list": [comm]}) == {"comm": comm, "list": [comm]}


@on_ranks("two")
def test_communicator_pickle_error_recommends_state_dict(comm: Communicator) -> None:
    with pytest.raises(InvalidArgumentError, match="state_dict"):
        pickle.dumps({"comm": comm})


@on_ranks("two")
def test_communicator_shallow_copy_makes_calls(comm: Communicator) -> None:
    assert copy.copy(comm).all_reduce(np.ones(2)).tolist() == [2, 2]


@on_ranks("two")
def test_uninitialised_link_pickle_leaves_communicator_out(comm: Communicator) -> None:
    adapter, chainer, _ = _link()
    link = chainer.links.Linear(None, 2, initialW=chainer.initializers.One())
    adapter.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(link)
    twin = pickle.loads(pickle.dumps(link))
    if comm.rank == 0:  # the call involves no other rank
        twin(np.ones((1, 3), np.float32))
        assert twin.W.array.tolist() == [[1, 1, 1]] * 2
    comm.barrier()


@on_ranks("two")
def test_link_copied_during_training_has_separate_gradients(comm: Communicator) -> None:
    adapter, chainer, link = _link()
    optimizer = adapter.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(link)
    x = np.full((2, 3), comm.rank + 1, np.float32)
    for _ in range(2):
        optimizer.update(lambda: chainer.functions.sum(link(x)))
    gradient = link.W.grad.copy()
    twin = copy.deepcopy(link)
    assert not np.may_share_memory(twin.W.grad, link.W.grad)
    assert not np.may_share_memory(twin.W.array, link.W.array)
    if comm.rank == 0:
        twin.cleargrads()
        chainer.functions.sum(twin(x)).backward()
        assert twin.W.grad.tolist() == [[2, 2, 2]] * 2
    assert (link.W.grad == gradient).all()
    optimizer.update(lambda: chainer.functions.sum(link(x)))


@on_ranks("two")
def test_split_deep_copy_computes_over_same_ranks(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    from collective.adapters.torch import Split

    split = Split(torch.nn.Conv2d(1, 2, 3).double(), data=(2,), comm=comm)
    x = torch.ones(1, 1, 8, 8, dtype=torch.float64)
    before = split(x).detach()
    twin = copy.deepcopy(split)
    twin.module.weight.data.zero_()
    twin.module.bias.data.fill_(7)
    assert (twin(x) == 7).all()
    assert torch.equal(split(x), before)
