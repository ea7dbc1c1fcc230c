"""PyTorch training that continues after ranks are lost: its weights and its samples."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler

from collective import elastic
from collective.adapters.torch import (
    DistributedDataParallel,
    ShardedOptimizer,
    ShardedSampler,
    SyncBatchNorm,
)
from collective.compression import Cast
from tests.support.on_ranks import on_ranks, ranks_of

SAMPLES, BATCH, STEPS = 96, 4, 20
#: Rank 3 is lost in step 2, and rank 0 in step 12, in the second epoch.
LOSSES = {3: 2, 0: 12}


ranks = ranks_of(("threads", 4))


def made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(3)  # threads would share the global generator
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=own)
    targets = torch.randint(0, 3, (SAMPLES,), generator=own)
    return module, torch.randn(SAMPLES, 8, generator=own), targets


def wrapped(module: nn.Module, comm: Any) -> DistributedDataParallel:
    def in_rank_order(bucket):
        array = bucket.array
        return ddp.comm.all_reduce(array, op="avg", out=array, order="rank", async_op=True)

    ddp = DistributedDataParallel(module, comm, reduce=in_rank_order)
    return ddp


def step(ddp: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(inputs), targets).backward()
    optimizer.step()


def outcome(module: nn.Module, optimizer: Any) -> bytes:
    momenta = [optimizer.state[p]["momentum_buffer"] for p in module.parameters()]
    tensors = [*module.state_dict().values(), *momenta]
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def elastically(comm) -> Any:
    origin = comm.rank
    module, inputs, targets = made()
    ddp = wrapped(module, comm)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    sampler = ShardedSampler(SAMPLES, comm, seed=1)
    state = elastic.State(
        comm, model=ddp, optimizer=optimizer, sampler=sampler, step=0, epoch=0, kept=0
    )
    taken = []
    for generation in elastic.generations(comm, state):
        with generation as comm:
            del taken[state.step :]  # drop the batch of a step that was undone
            while state.step < STEPS:
                sampler.set_epoch(state.epoch)
                for batch in BatchSampler(sampler, BATCH, drop_last=False):
                    if LOSSES.get(origin) == state.step:
                        comm.close()
                        return taken, b""
                    step(ddp, optimizer, inputs[batch], targets[batch])
                    taken.append((state.epoch, batch))
                    state.step += 1
                    state.commit()
                    if state.step == STEPS:
                        break
                else:
                    state.epoch += 1
    return taken, outcome(module, optimizer)


def by_hand(comm) -> bytes:
    """Run the same steps over fixed groups of equal sizes, and compute each batch's indices."""
    module, inputs, targets = made()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    epoch, at, begun = 0, 0, 0
    for members, stop in (([0, 1, 2, 3], 2), ([0, 1, 2], 12), ([1, 2], STEPS)):
        if comm.rank not in members:
            break
        before, module = optimizer.state_dict(), copy.deepcopy(module)  # without hooks
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.load_state_dict(before)
        group = comm.group(members)
        ddp = wrapped(module, group)
        for _ in range(begun, stop):
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1 + epoch))
            wide = order[at : at + BATCH * len(members)]
            mine = wide[members.index(comm.rank) :: len(members)]
            step(ddp, optimizer, inputs[mine], targets[mine])
            at += len(wide)
            if at == SAMPLES:
                epoch, at = epoch + 1, 0
        begun = stop
    comm.barrier()  # ranks that have finished wait here until the other ranks have finished
    return outcome(module, optimizer) if comm.rank in members else b""


def test_elastic_loop_equals_fixed_groups_and_uses_each_sample_once(ranks):
    results, expected = ranks.run(elastically), ranks.run(by_hand)
    assert [bytes_ for _, bytes_ in results] == expected
    assert expected[1] == expected[2] != b""
    counted = collections.Counter(
        (epoch, int(index)) for taken, _ in results for epoch, batch in taken for index in batch
    )
    for epoch in (0, 1):
        assert [counted[epoch, index] for index in range(SAMPLES)] == [1] * SAMPLES
    assert max(counted.values()) == 1


def rebound(comm) -> list[float]:
    """Rebind a wrapper to a group during an unfinished backward pass; return gradient sums."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), SyncBatchNorm(2, comm))
    ddp = DistributedDataParallel(module, comm, reduce=Cast(comm.dup(), "float16"))
    pending = ddp(torch.ones(3, 2) * comm.rank).sum()
    ddp._gradients.ready(0)  # a failed pass leaves such a state: one of several gradients is ready
    group = comm.group([0, 2]) if comm.rank in (0, 2) else comm.group([1, 3])
    ddp.rebind(group)
    del pending
    assert all(p.grad is None for p in ddp.parameters())
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]) * (comm.rank + 1)
    ddp(x).square().sum().backward()
    assert module[1].comm is group
    return [float(p.grad.sum()) for p in ddp.parameters()]


def test_ddp_rebind_continues_over_other_ranks(ranks):
    sums = ranks.run(rebound)
    assert sums[0] == sums[2]
    assert sums[1] == sums[3]
    assert sums[0] != sums[1]


# -- the sampler ---------------------------------------------------------------------


@pytest.mark.parametrize("length", [24, 25, 31])
@pytest.mark.parametrize(
    "options", [{}, {"padded": True}, {"drop_last": True}], ids=["exact", "padded", "drop_last"]
)
def test_reshard_distributes_rest_of_epoch(length: int, options: dict[str, bool]):
    before = [ShardedSampler(length, (rank, 4), seed=5, **options) for rank in range(4)]
    order = torch.randperm(length, generator=torch.Generator().manual_seed(5)).tolist()
    iterators = [iter(sampler) for sampler in before]
    assert [next(part) for _ in range(2) for part in iterators] == order[:8]
    after = [ShardedSampler(length, (rank, 4), seed=5, **options) for rank in range(3)]
    for rank, sampler in enumerate(after):
        sampler.reshard((rank, 3), 8)
    rests = [list(sampler) for sampler in after]
    rest = [index for row in zip(*rests) for index in row]
    if options:
        assert len({len(part) for part in rests}) == 1
        left = length - 8
        expected = left // 3 * 3 if "drop_last" in options else -(-left // 3) * 3
        assert rest == (order + order)[8 : 8 + expected]
    else:
        assert sorted(index for part in rests for index in part) == sorted(order[8:])
    # The next epoch is complete.
    assert sum(len(list(sampler)) for sampler in after) >= length // 3 * 3


def test_sampler_position_at_end_of_epoch_equals_length_on_all_ranks():
    samplers = [ShardedSampler(25, (rank, 4)) for rank in range(4)]
    for sampler in samplers:
        list(sampler)
    assert [sampler.state_dict()["taken"] for sampler in samplers] == [25] * 4


@on_ranks("ranks")
def test_commit_with_sampler_count_ignores_prefetched_samples(comm):
    sampler = ShardedSampler(12, comm, shuffle=False)
    state = elastic.State(comm, sampler=sampler)
    iterator = iter(sampler)
    for _ in range(3):  # a loader with workers requests more samples than have been used
        next(iterator)
    state.commit(sampler=1)
    state.restore()
    assert list(sampler) == [4 + comm.rank, 8 + comm.rank]


@on_ranks("ranks")
def test_restore_brings_back_exact_optimizer_state(comm):
    """Check that repeated restores agree, although optimizers modify a loaded state in place."""
    module, inputs, targets = made()
    optimizer = torch.optim.Adam(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = elastic.State(comm, model=module, optimizer=optimizer, scheduler=scheduler)

    def steps() -> bytes:
        for _ in range(3):
            step(module, optimizer, inputs, targets)
            scheduler.step()
        return b"".join(p.detach().numpy().tobytes() for p in module.parameters())

    fresh = steps()
    state.restore()
    assert steps() == fresh
    state.commit()
    later = steps()
    for _ in range(2):  # if restore() shared its copy, the first round would modify that copy
        state.restore()
        assert steps() == later != fresh


def _check_moments_after_a_join(comm: Any, sharded: bool) -> None:
    """Check that a fused optimizer goes on alike after its state came from another rank."""
    module, alone = (nn.Conv2d(3, 4, 2, bias=False) for _ in range(2))
    for each in (module, alone):
        each.to(memory_format=torch.channels_last)
        each.weight.data.copy_(torch.linspace(-1, 1, 48).reshape(4, 3, 2, 2))
    adam, options = torch.optim.Adam, {"lr": 0.1, "fused": True}
    optimizer, plain = (adam(each.parameters(), **options) for each in (module, alone))
    if sharded:
        optimizer = ShardedOptimizer(module.parameters(), adam, comm, **options)

    def trained(steps: int) -> None:
        for _ in range(steps):
            for each, stepping in ((module, optimizer), (alone, plain)):
                stepping.zero_grad()
                each(torch.linspace(0, 1, 48).reshape(1, 3, 4, 4)).square().sum().backward()
                stepping.step()

    trained(2)
    if comm.rank == 1 and not sharded:  # this rank knows nothing
        module.weight.data.zero_()
        optimizer = adam(module.parameters(), **options)
    state = elastic.State(comm, module=module, optimizer=optimizer)
    state.sync(comm)
    trained(2)
    torch.testing.assert_close(module.weight, alone.weight)


@pytest.mark.parametrize("sharded", [False, True])
def test_state_from_another_rank_gets_the_strides_of_parameters(ranks: Any, sharded: bool) -> None:
    ranks.run(_check_moments_after_a_join, sharded)
