"""``DistributedDataParallel`` with uneven inputs and with sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import collective
from collective.adapters.torch import DistributedDataParallel, all_reduce_sparse
from collective.testing import RankPool, RanksFailedError
from tests.support.on_ranks import on_ranks, ranks_of
from tests.support.selection import in_whole

pool = ranks_of(("threads", 2), ("shm", 3), in_whole(("gloo", 2)))
two = ranks_of(("threads", 2))


# -- uneven inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("unused", [True, False])
@on_ranks("pool")
def test_ddp_join_averages_over_present_or_all_ranks(comm: Any, by_all: bool, unused: bool) -> None:
    """Check the weight: each step averages over the present ranks, or over all ranks."""
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1, bias=False))
    model = model.double()
    nn.init.zeros_(model[1].weight)
    ddp = DistributedDataParallel(model, comm, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    steps = 2 + comm.rank
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    target = x / (1 + 1e-5) ** 0.5
    with ddp.join(by_all):
        for _ in range(steps):
            optimizer.zero_grad()
            # The gradient is -1 on each present rank.
            (-(ddp(x) * target / target.square()).mean()).backward()
            optimizer.step()
    expected = 0.0
    for step in range(2 + comm.size - 1):
        there = sum(step < 2 + rank for rank in range(comm.size))
        expected += there / comm.size if by_all else 1.0
    got = model[1].weight.detach()
    torch.testing.assert_close(got, torch.full_like(got, expected))
    assert model[0].num_batches_tracked == 2 + comm.size - 1  # buffers are equal at the end, too


@on_ranks("two")
def test_ddp_join_with_static_graph_lets_rank_0_finish_first(comm: Any) -> None:
    model = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(model, comm, static_graph=True, bucket_mib=1e-5)
    for _ in range(2):
        with ddp.join():
            for _ in range(2 * comm.rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 2)).sum().backward()
                assert (model.weight.grad == 0.5).all()
    ddp.zero_grad()
    ddp(torch.ones(1, 2)).sum().backward()
    assert (model.weight.grad == 1.0).all()


def test_uneven_batches_without_join_name_the_remedies(two: RankPool) -> None:
    with pytest.raises(RanksFailedError, match=r"different numbers of batches\?.*model\.join\(\)"):
        two.run(trains_longer_on_rank_1, timeout=20.0)


def trains_longer_on_rank_1(comm: Any) -> None:
    with comm:
        ddp = DistributedDataParallel(nn.Linear(2, 1), comm)
        for _ in range(1 + comm.rank):
            ddp(torch.ones(1, 2)).sum().backward()


def test_ddp_join_error_ends_all_ranks(two: RankPool) -> None:
    with pytest.raises(RanksFailedError, match="no more of it") as caught:
        two.run(fails_inside, timeout=20.0)
    assert "PeerFailedError" in str(caught.value)


def fails_inside(comm: Any) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 1), comm)
    with comm, ddp.join():
        for step in range(3):
            if comm.rank and step == 1:
                raise ValueError("no more of it")
            ddp(torch.ones(1, 2)).sum().backward()


# -- sparse gradients -----------------------------------------------------------------------------


@on_ranks("pool")
def test_all_reduce_sparse_equals_dense_sum(comm: Any) -> None:
    rank, size = comm.rank, comm.size
    # Ranks have different numbers of elements. Rank 0 has none, and rank 3 some indices twice.
    indices = torch.tensor([[i % 4 for i in range(2 * rank)], [i % 2 for i in range(2 * rank)]])
    own = torch.sparse_coo_tensor(
        indices.long(), torch.arange(2.0 * rank) + 1, (4, 2), check_invariants=True
    )
    expected = comm.all_reduce(own.to_dense())
    total = all_reduce_sparse(own, comm)
    assert total.is_coalesced()
    torch.testing.assert_close(total.to_dense(), expected)
    torch.testing.assert_close(all_reduce_sparse(own, comm, "avg").to_dense(), expected / size)
    rows = torch.sparse_coo_tensor(
        [[rank, 0]], torch.ones(2, 3), (size, 3), check_invariants=True
    )  # whole rows
    expected = comm.all_reduce(rows.to_dense())
    torch.testing.assert_close(all_reduce_sparse(rows, comm).to_dense(), expected)
    with pytest.raises(
        collective.InvalidArgumentError, match="'sum' or 'avg', and a tensor in COO"
    ):
        all_reduce_sparse(expected, comm)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.table, sparse=True)


@on_ranks("two")
def test_ddp_sparse_gradient_outside_embedding_becomes_dense(comm: Any) -> None:
    model = Looks()
    ddp = DistributedDataParallel(model, comm)
    ddp(torch.tensor([comm.rank])).sum().backward()
    assert model.table.grad.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=sparse).double()
        self.bag = nn.EmbeddingBag(9, 4, sparse=sparse, mode="sum").double()
        self.out = nn.Linear(4, 1).double()
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(x).sum(1) + self.bag(x))


@pytest.mark.parametrize("unused", [True, False])
@on_ranks("pool")
def test_ddp_sparse_embeddings_train_as_dense(comm: Any, unused: bool) -> None:
    model, alone = Words(sparse=True), Words(sparse=False)
    ddp = DistributedDataParallel(model, comm, find_unused_parameters=unused)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, alone)]
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        x = torch.randint(9, (2 * comm.size, 3), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(x.chunk(comm.size)[comm.rank]).mean().backward()
        alone(x).mean().backward()
        assert model.words.weight.grad.is_sparse
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with ddp.join():
        for _ in range(comm.rank):
            ddp.zero_grad()
            ddp(x).mean().backward()
            assert model.words.weight.grad.is_sparse
