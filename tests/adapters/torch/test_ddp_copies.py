"""Copies and pickles of ``DistributedDataParallel``: they train and leave the original alone."""

from __future__ import annotations

import copy
import io
import mmap
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from collective.adapters.torch import DistributedDataParallel
from collective.communicator import Communicator
from collective.start.session import set_current
from collective.testing import RankPool
from tests.support.on_ranks import on_ranks, ranks_of

two = ranks_of(("threads", 2), ("shm", 2))


def _model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(5)  # thread ranks share PyTorch's default generator
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return layers.double()


def _batch(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)


def _gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of one backward pass, starting from none."""
    model.zero_grad()
    (model(x) ** 2).mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _steps(model: nn.Module, comm: Communicator, first: int, last: int, optimizer: Any) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        (model(_batch(comm.rank, step)) ** 2).mean().backward()
        optimizer.step()


def _equal(a: Any, b: Any) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all(torch.equal(x, y) for x, y in pairs)


def _saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _trained(comm: Communicator) -> DistributedDataParallel:
    """Return a wrapper whose gradients are in the transport's memory."""
    model = DistributedDataParallel(_model(), comm)
    _gradients(model, _batch(comm.rank))
    return model


@on_ranks("two")
def test_ddp_deepcopy_has_separate_parameters(comm: Communicator) -> None:
    model = _trained(comm)
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert _equal(twin.state_dict().values(), model.state_dict().values())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, other in zip(twin.parameters(), model.parameters(), strict=True):
        assert parameter.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
        assert not isinstance(parameter.detach().numpy().base, mmap.mmap)
        assert parameter.grad is None
        parameter.data.zero_()
    assert _equal(model.parameters(), before)


@pytest.mark.parametrize("saved", [False, True], ids=["deepcopy", "save and load"])
@on_ranks("two")
def test_ddp_copy_averages_separate_gradients(comm: Communicator, saved: bool) -> None:
    model = _trained(comm)
    originals = [parameter.grad.clone() for parameter in model.parameters()]
    twin = _loaded(_saved(model)) if saved else copy.deepcopy(model)
    if saved:
        twin.rebind(comm)
    gradients = _gradients(twin, _batch(comm.rank, 1))
    for gradient in gradients:  # both ranks have identical gradients although their batches differ
        assert torch.equal(*comm.all_gather(gradient[None]))
    assert _equal([parameter.grad for parameter in model.parameters()], originals)
    assert _equal(gradients, _gradients(model, _batch(comm.rank, 1)))


@on_ranks("two")
def test_ddp_original_trains_identically_after_copy(comm: Communicator) -> None:
    weights = []
    for copies in (False, True):
        model = DistributedDataParallel(_model(), comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _steps(model, comm, 0, 2, optimizer)
        if copies:
            twin = copy.deepcopy(model)
            _steps(twin, comm, 7, 9, torch.optim.SGD(twin.parameters(), lr=0.1))
        _steps(model, comm, 2, 4, optimizer)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert _equal(*weights)


@on_ranks("two")
def test_ddp_copy_and_save_need_no_other_rank(comm: Communicator) -> None:
    model = _trained(comm)
    if comm.rank == 0:
        copies = [copy.deepcopy(model), _loaded(_saved(model)), AveragedModel(model)]
        with torch.no_grad():
            for twin in copies:
                twin.eval()
                assert torch.equal(twin(_batch(0)), model.eval()(_batch(0)))
        model.train()
    comm.barrier()
    _gradients(model, _batch(comm.rank))


@on_ranks("two")
def test_ddp_averaged_model_equals_that_of_bare_module(comm: Communicator) -> None:
    model = DistributedDataParallel(_model(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, bare = AveragedModel(model), AveragedModel(model.module)
    for step in range(3):
        _steps(model, comm, step, step + 1, optimizer)
        wrapped.update_parameters(model)
        bare.update_parameters(model.module)
    assert _equal(wrapped.module.module.parameters(), bare.module.parameters())


@on_ranks("two")
def test_ddp_frozen_copy_makes_no_call(comm: Communicator) -> None:
    model = _trained(comm)
    twin = copy.deepcopy(model).requires_grad_(False)
    if comm.rank == 0:
        x = _batch(0).requires_grad_()
        twin.eval()(x).sum().backward()
        assert x.grad is not None
    comm.barrier()


@on_ranks("two")
def test_ddp_copy_accumulates_locally_within_no_sync(comm: Communicator) -> None:
    twin = copy.deepcopy(_trained(comm))
    with twin.no_sync():
        alone = _gradients(twin, _batch(comm.rank, 1))
    assert not torch.equal(*comm.all_gather(alone[0][None]))
    (twin(_batch(comm.rank, 1)) ** 2).mean().backward()
    both = twin.module[0].weight.grad
    assert torch.equal(*comm.all_gather(both[None]))


@on_ranks("two")
def test_ddp_copy_made_within_no_sync_reduces(comm: Communicator) -> None:
    model = _trained(comm)
    with model.no_sync():
        twin = copy.deepcopy(model)
    assert torch.equal(*comm.all_gather(_gradients(twin, _batch(comm.rank))[0][None]))


@on_ranks("two")
def test_ddp_shallow_copy_shares_gradients(comm: Communicator) -> None:
    model = _trained(comm)
    twin = copy.copy(model)
    assert _equal(_gradients(twin, _batch(comm.rank)), _gradients(model, _batch(comm.rank)))


def _averaged(comm: Communicator) -> tuple[bytes, list[torch.Tensor]]:
    model = DistributedDataParallel(_model(), comm)
    return _saved(model), _gradients(model, _batch(comm.rank))


def test_ddp_loaded_without_ranks_computes_as_bare_module(two: RankPool) -> None:
    data, _ = two.run(_averaged)[0]
    model = _loaded(data)
    with model.join():
        gradients = _gradients(model, _batch(0))
    assert _equal(gradients, _gradients(_model(), _batch(0)))
    with torch.no_grad():
        assert torch.equal(model.eval()(_batch(0)), model.module(_batch(0)))


@on_ranks("two")
def test_ddp_loaded_averages_over_current_communicator(comm: Communicator) -> None:
    data, expected = _averaged(comm)
    set_current(comm)
    assert _equal(_gradients(_loaded(data), _batch(comm.rank)), expected)


@on_ranks("two")
def test_ddp_copy_uses_same_reduce_function(comm: Communicator) -> None:
    def double(bucket: Any) -> None:
        comm.all_reduce(bucket.array, op="sum", out=bucket.array)

    model = DistributedDataParallel(_model(), comm, reduce=double)
    twin = copy.deepcopy(model)
    assert _equal(_gradients(twin, _batch(comm.rank)), _gradients(model, _batch(comm.rank)))
