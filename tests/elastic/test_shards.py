"""Sharded optimizer state survives the loss of ranks whose shards have copies on other ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import collective
from collective import elastic
from collective.adapters.torch import DistributedDataParallel, ShardedOptimizer
from collective.errors import InvalidArgumentError, StateLostError
from tests.support.on_ranks import ranks_of

STEPS = 6


ranks = ranks_of(("threads", 4))


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(3)  # threads share the global generator
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def trained(comm, losses: dict[int, int], copies: int, where: str = "step") -> Any:
    """Train with Adam, whose state is sharded, or whole on each rank if ``copies`` is 0."""
    origin, network_ = comm.rank, network()
    model = DistributedDataParallel(network_, comm)
    parameters = model.parameters()
    if copies:
        optimizer: Any = ShardedOptimizer(
            parameters, torch.optim.Adam, comm, lr=0.05, copies=copies
        )
    else:
        optimizer = torch.optim.Adam(parameters, lr=0.05)
    state = elastic.State(comm, model=model, optimizer=optimizer, step=0)
    keep = getattr(optimizer, "keep_shards", None)

    def keep_and_leave():
        shards = keep()
        if losses.get(origin) == state.step:
            state.comm.close()
        return shards

    if where == "commit":
        optimizer.keep_shards = keep_and_leave
    try:
        for generation in elastic.generations(comm, state):
            with generation as comm:
                while state.step < STEPS:
                    if where == "step" and losses.get(origin) == state.step:
                        comm.close()
                        return None
                    optimizer.zero_grad()
                    model(torch.full((3, 5), 0.1 * (state.step + 1))).square().sum().backward()
                    optimizer.step()
                    state.step += 1
                    state.commit()
    except collective.CommunicatorClosedError:
        return None
    except StateLostError as error:
        return str(error)
    return b"".join(p.detach().numpy().tobytes() for p in network_.parameters())


@pytest.mark.parametrize("where", ["step", "commit"])
@pytest.mark.parametrize(
    ("losses", "copies"),
    [({}, 1), ({1: 3}, 2), ({0: 1, 2: 4}, 2), ({3: 2, 0: 2}, 3), ({0: 2, 2: 2}, 2)],
)
def test_training_after_loss_matches_unsharded_training(ranks, losses, copies, where):
    weights = ranks.run(trained, losses, copies, where)
    # A loss within a commit undoes the step before the commit.
    undone = {rank: step - (where == "commit") for rank, step in losses.items()}
    expected = ranks.run(trained, undone, 0)
    assert [result is None for result in weights] == [rank in losses for rank in range(4)]
    assert weights == expected


@pytest.mark.parametrize(
    ("losses", "copies", "gone"), [({1: 3}, 1, "[1]"), ({1: 3, 2: 3}, 2, "[1]")]
)
def test_state_lost_error_names_ranks_without_copies(ranks, losses, copies, gone):
    results = ranks.run(trained, losses, copies)
    for rank, text in enumerate(results):
        if rank not in losses:
            assert isinstance(text, str), text
            assert "ShardedOptimizer: the state of parameter " in text
            assert f"was only on ranks {gone}" in text


def test_loss_before_first_step_loses_no_state(ranks):
    assert ranks.run(trained, {1: 0}, 1) == ranks.run(trained, {1: 0}, 0)


def half_way(comm) -> Any:
    """Commit four times, where some ranks see a loss in a barrier that other ranks have passed."""
    parameters = list(network().parameters())
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, comm, lr=1.0, momentum=0.9)
    state = elastic.State(comm, optimizer=optimizer, weights=torch.zeros(2), step=0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    pass_barrier = comm.barrier

    def commit(step: int, *unlucky: int) -> None:
        def barrier():
            pass_barrier()
            if comm.rank in unlucky:
                raise collective.PeerLostError("found in the barrier")

        comm.barrier = barrier
        state.step = step
        state.weights[:] = step
        with contextlib.suppress(collective.PeerLostError):
            state.commit()
        comm.barrier = pass_barrier

    commit(1)
    commit(2)
    commit(3, 2)
    before = state.commits
    state.sync(comm)
    counters = [before, state.commits, state.step, len(optimizer.state_dict()["state"])]
    commit(4, *range(comm.size))  # must not overwrite the memory of the third commit
    state.restore()
    return [*counters, *state.weights.tolist()]


def test_commit_completed_by_some_rank_holds_on_all(ranks):
    results = ranks.run(half_way)
    assert results == [[before, 3, 3, 6, 3.0, 3.0] for before in (3, 3, 2, 3)]


def test_sharded_optimizer_with_zero_copies_raises_invalid_argument(ranks):
    with (
        collective.init(size=1, rank=0) as comm,
        pytest.raises(InvalidArgumentError, match="at least 1"),
    ):
        ShardedOptimizer(network().parameters(), torch.optim.SGD, comm, copies=0, lr=1.0)
