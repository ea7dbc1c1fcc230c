"""Arguments of the adapters: the current communicator by default, and names of other libraries."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import collective
from collective.errors import CommunicatorClosedError, InvalidArgumentError
from tests.support.on_ranks import on_ranks, ranks_of

two = ranks_of(("threads", 2))
MODULES = (
    "collective.adapters.torch",
    "collective.adapters.torch.functional",
    "collective.adapters.chainer",
    "collective.adapters.chainer.functional",
    "collective.compression",
)


def _module(name: str) -> Any:
    """Return a module; skip the test if its framework is not installed."""
    framework = name.split(".")[2] if "adapters" in name else "numpy"
    if framework == "chainer":
        importlib.import_module("collective.adapters.chainer")
    pytest.importorskip(framework)
    return importlib.import_module(name)


def _over_ranks(module: Any) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield the names of a module that take a communicator, with that parameter."""
    for name in module.__all__:
        member = getattr(module, name)
        if not callable(member) or (inspect.isclass(member) and issubclass(member, Exception)):
            continue
        parameters = inspect.signature(member).parameters
        for parameter in ("comm", "comm_or_rank_size"):
            if parameter in parameters:
                yield name, parameters[parameter]


@pytest.mark.parametrize("name", MODULES)
def test_communicator_is_optional_in_every_adapter(name: str) -> None:
    found = dict(_over_ranks(_module(name)))
    assert found
    assert {name for name, parameter in found.items() if parameter.default is not None} == set()


# -- PyTorch --------------------------------------------------------------------------------------


@on_ranks("two")
def test_ddp_without_communicator_averages_over_current_one(comm: Any) -> None:
    torch = pytest.importorskip("torch")
    ddp = _module(MODULES[0]).DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    ddp(torch.full((1, 1), comm.rank + 1.0)).backward()
    assert ddp.comm is collective.current()
    assert ddp.module.weight.grad.item() == 1.5


@on_ranks("two")
def test_torch_functions_without_communicator_use_current_one(comm: Any) -> None:
    torch = pytest.importorskip("torch")
    adapter, functional = _module(MODULES[0]), _module(MODULES[1])
    x = torch.full((2,), float(comm.rank))
    assert functional.all_reduce(x).tolist() == [1.0, 1.0]
    assert functional.broadcast(x, root=1).tolist() == [1.0, 1.0]
    if comm.rank == 0:
        functional.send(x, 1)
    else:
        assert functional.recv(src=0).tolist() == [0.0, 0.0]
    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight.grad = torch.full((1, 1), float(comm.rank))
    adapter.sync_gradients(linear)
    assert linear.weight.grad.item() == 0.5
    assert adapter.all_reduce_sparse(x.to_sparse()).to_dense().tolist() == [1.0, 1.0]
    sampler = adapter.ShardedSampler(10)
    assert (sampler.rank, sampler.size) == (comm.rank, 2)
    assert adapter.SyncBatchNorm(3).comm is collective.current()
    norms = adapter.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
    assert norms[0].comm is collective.current()


@on_ranks("two")
def test_sharded_optimizer_without_communicator_uses_current_one(comm: Any) -> None:
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(1, 1)
    optimizer = _module(MODULES[0]).ShardedOptimizer(linear.parameters(), torch.optim.SGD, lr=1.0)
    linear(torch.ones(1, 1)).backward()
    optimizer.step()
    assert len(comm.all_gather_object(linear.weight.item())) == 2


def test_ddp_without_any_communicator_names_the_remedy() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(CommunicatorClosedError, match=r"call collective\.init\(\) first"):
        _module(MODULES[0]).DistributedDataParallel(torch.nn.Linear(1, 1))


@on_ranks("two")
def test_ddp_given_device_ids_by_position_names_comm(comm: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgumentError, match=r"DistributedDataParallel: comm is \[0\] of "):
        _module(MODULES[0]).DistributedDataParallel(torch.nn.Linear(1, 1), [0])


@on_ranks("two")
def test_functional_recv_without_source_is_refused(comm: Any) -> None:
    with pytest.raises(collective.RankError, match="Name the source rank"):
        _module(MODULES[1]).recv()


def _namesakes() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return functions of PyTorch, with those of the adapter that replace them."""
    torch = pytest.importorskip("torch")
    sharded = pytest.importorskip("torch.distributed.optim").ZeroRedundancyOptimizer
    ours, nn = _module(MODULES[0]), torch.nn
    return {
        "ddp": (nn.parallel.DistributedDataParallel, ours.DistributedDataParallel),
        "optimizer": (sharded, ours.ShardedOptimizer),
        "sampler": (torch.utils.data.DistributedSampler, ours.ShardedSampler),
        "norm": (nn.SyncBatchNorm, ours.SyncBatchNorm),
        "convert": (nn.SyncBatchNorm.convert_sync_batchnorm, ours.convert_sync_batchnorm),
    }


@pytest.mark.parametrize("kind", ["ddp", "optimizer", "sampler", "norm", "convert"])
def test_every_argument_of_torch_s_namesake_is_taken_or_explained(kind: str) -> None:
    theirs, ours = _namesakes()[kind]
    own = inspect.signature(ours).parameters
    for keyword, parameter in inspect.signature(theirs).parameters.items():
        if keyword in own or parameter.kind is parameter.VAR_KEYWORD:
            continue
        with pytest.raises(TypeError, match=f"{ours.__name__}: keyword '{keyword}'; one of .*; "):
            ours(**{keyword: None})


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("device_ids", "leave it out"),
        ("process_group", "use comm="),
        ("bucket_cap_mb", "use bucket_mib="),
        ("gradient_as_bucket_view", "gradients are always views"),
    ],
)
def test_ddp_keyword_of_torch_names_the_remedy(keyword: str, remedy: str) -> None:
    with pytest.raises(TypeError, match=remedy):
        _module(MODULES[0]).DistributedDataParallel(None, **{keyword: 1})


# -- Chainer --------------------------------------------------------------------------------------


@on_ranks("two")
def test_chainer_optimizer_without_communicator_averages_over_current_one(comm: Any) -> None:
    adapter = _module(MODULES[2])
    chainer = importlib.import_module("chainer")
    link = chainer.links.Linear(1, 1, nobias=True, initialW=0)
    optimizer = adapter.create_multi_node_optimizer(chainer.optimizers.SGD(1.0)).setup(link)
    optimizer.update(lambda: chainer.functions.sum(link(np.full((1, 1), comm.rank + 1, "f"))))
    assert link.W.array.item() == -1.5


@on_ranks("two")
def test_chainer_functions_without_communicator_use_current_one(comm: Any) -> None:
    adapter, functional = _module(MODULES[2]), _module(MODULES[3])
    links = importlib.import_module("chainer.links")
    x = np.full(2, comm.rank, np.float32)
    assert functional.all_reduce(x).array.tolist() == [1.0, 1.0]
    if comm.rank == 0:
        functional.send(x, 1)
    else:
        assert functional.recv(src=0).array.tolist() == [0.0, 0.0]
    assert len(adapter.scatter_dataset(range(10))) == 5
    assert len(next(adapter.ShardedIterator(range(10), 5, shuffle=False))) == 5
    assert adapter.SyncBatchNormalization(3).comm is collective.current()
    link = links.Linear(1, 1, initialW=comm.rank)
    adapter.broadcast_state(link, root=1)
    assert link.W.array.item() == 1.0


@pytest.mark.parametrize(
    ("name", "keyword", "remedy"),
    [
        ("create_multi_node_optimizer", "communicator", "use comm="),
        ("create_multi_node_optimizer", "double_buffering", "leave it out"),
        ("create_multi_node_evaluator", "communicator", "use comm="),
        ("scatter_dataset", "force_equal_length", "use padded="),
        ("SyncBatchNormalization", "communication_backend", "leave it out"),
    ],
)
def test_chainer_keyword_of_chainermn_names_the_remedy(
    name: str, keyword: str, remedy: str
) -> None:
    function = getattr(_module(MODULES[2]), name)
    with pytest.raises(TypeError, match=f"{name}: keyword '{keyword}'; one of .*; {remedy}"):
        function(None, **{keyword: None})


# -- compression ----------------------------------------------------------------------------------


@on_ranks("two")
def test_compression_without_communicator_averages_over_current_one(comm: Any) -> None:
    torch = pytest.importorskip("torch")
    ddp = _module(MODULES[0]).DistributedDataParallel(
        torch.nn.Linear(1, 1, bias=False), reduce=_module(MODULES[4]).Cast()
    )
    ddp(torch.full((1, 1), comm.rank + 1.0)).backward()
    assert ddp.module.weight.grad.item() == 1.5
