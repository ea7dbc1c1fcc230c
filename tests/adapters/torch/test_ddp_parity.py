"""``DistributedDataParallel`` compared with PyTorch's own over Gloo: same model, seeds and data."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as Torchs

from collective.adapters.torch import DistributedDataParallel
from collective.testing import RankPool
from tests.adapters.torch import test_ddp_passes as passes
from tests.support.on_ranks import ranks_of

pool = ranks_of(("shm", 2))


class Net(nn.Module):
    """A network with convolutions, batch normalisation and, if ``branches``, alternating layers."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        self.hidden = nn.ModuleList(nn.Linear(144, 16) for _ in range(1 + branches))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        chosen = self.hidden[step % len(self.hidden)]
        return self.head(torch.tanh(chosen(self.features(x))))


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("way", ["plain", "unused", "accumulate", "static"])
def test_ddp_training_equals_torch_ddp(
    pool: RankPool, tmp_path: Path, way: str, optimizer: str
) -> None:
    pool.run(both, str(tmp_path / "store"), way, optimizer)


@contextlib.contextmanager
def gloo(comm: Any, store: str) -> Iterator[None]:
    files = dist.FileStore(store, comm.size)
    dist.init_process_group("gloo", store=files, rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        # PyTorch's wrapper must be freed before its process group. Otherwise its destructor waits
        # for Gloo's threads while it holds the interpreter's lock, which those threads may need.
        gc.collect()
        dist.destroy_process_group()


def both(comm: Any, store: str, way: str, optimizer: str) -> None:
    with gloo(comm, store):
        states = [trained(comm, ours, way, optimizer) for ours in (True, False)]
        for name, value in states[0].items():
            if "running" in name and way == "accumulate" and comm.rank:
                continue  # the wrappers broadcast running statistics of rank 0 in different passes
            torch.testing.assert_close(value, states[1][name], rtol=1e-9, atol=1e-10)


def trained(comm: Any, ours: bool, way: str, optimizer: str) -> dict[str, torch.Tensor]:
    """Return the state after training with one of the wrappers."""
    torch.manual_seed(comm.rank)
    model = Net(way == "unused").double()
    options = {"find_unused_parameters": way == "unused", "static_graph": way == "static"}
    wrapped: Any
    if ours:
        wrapped = DistributedDataParallel(model, comm, bucket_mib=0.005, **options)
    else:
        wrapped = Torchs(model, bucket_cap_mb=1, gradient_as_bucket_view=True, **options)
    train(wrapped, getattr(torch.optim, optimizer), comm.rank, way == "accumulate")
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(wrapped: Any, kind: Any, rank: int, accumulate: bool) -> None:
    generator = torch.Generator().manual_seed(100 + rank)
    optimizer = kind(wrapped.parameters(), lr=0.02)
    for step in range(6):
        x = torch.randn(5, 1, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (5,), generator=generator)
        if accumulate and step % 2 == 0:
            with wrapped.no_sync():
                functional.cross_entropy(wrapped(x, step), y).backward()
            continue
        functional.cross_entropy(wrapped(x, step), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# Orders of passes that PyTorch's wrapper supports. In other orders it decides by the latest forward
# pass, and it never reduces twice. test_ddp_passes.py tests all orders with our wrapper.
ORDERS = [
    "no_sync forward while a synced one is pending", "no_sync backward last", "accumulated",
    "sum of synced and no_sync losses", "sum of no_sync and synced losses",
    "backward within no_sync", "forward without backward", "autograd.grad",
]  # fmt: skip


@pytest.fixture(scope="module")
def gradients(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return, for each rank and each order of passes, the gradients of both wrappers."""
    return pool.run(in_orders, str(tmp_path_factory.mktemp("orders") / "store"))


def in_orders(comm: Any, store: str) -> dict[str, list[Any]]:
    with gloo(comm, store):
        return {name: [in_order(comm, name, ours) for ours in (True, False)] for name in ORDERS}


def in_order(comm: Any, name: str, ours: bool) -> list[Any]:
    net = passes.Net("plain")
    wrapped: Any = DistributedDataParallel(net, comm) if ours else Torchs(net)
    return passes.after_each(passes.Replica(net, wrapped, comm.rank), passes.PROGRAMS[name])


@pytest.mark.parametrize("name", ORDERS)
def test_ddp_gradients_after_each_pass_equal_torch_ddp(gradients: Any, name: str) -> None:
    for rank in gradients:
        ours, reference = rank[name]
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)
