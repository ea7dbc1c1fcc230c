"""``DistributedDataParallel`` with compilation, checkpoints and autocast, and with a rank death."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import collective
from collective.adapters.torch import DistributedDataParallel
from collective.testing import RankDiedError, RankPool, RanksFailedError
from tests.adapters.torch.test_ddp import batches, compare, loss_of, mlp, shard, train
from tests.support.on_ranks import on_ranks, ranks_of

# Buckets so small that there are several.
SMALL = 0.0005

two = ranks_of(("threads", 2))
# These ranks are processes: Dynamo has one state for all threads of a process, and a test kills the
# process of one rank.
shm = ranks_of(("shm", 2))


# -- torch.compile --------------------------------------------------------------------------------


class Net(nn.Module):
    """A user-defined module, because compiling PyTorch's own containers in place has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.whole
@pytest.mark.parametrize("way", ["compiled module", "in place", "compiled wrapper"])
@on_ranks("shm")
def test_ddp_with_torch_compile_equals_one_process(comm: Any, way: str) -> None:
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters
    graphs.clear()
    model, alone = Net(), Net()
    inner: Any = model
    if way == "compiled module":
        inner = torch.compile(model, backend="aot_eager")
    elif way == "in place":
        model.compile(backend="aot_eager")
    ddp: Any = DistributedDataParallel(inner, comm, bucket_mib=SMALL)
    if way == "compiled wrapper":
        ddp = torch.compile(ddp, backend="aot_eager")
    compare(train(model, ddp, comm), train(alone, alone))
    assert graphs["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    if way == "in place":
        assert list(ddp.state_dict()) == list(alone.state_dict())


# -- activation checkpoints -----------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A network that recomputes activations in the backward pass, also of its last layer."""

    def __init__(self, reentrant: bool | None, times: int = 1) -> None:
        super().__init__()
        made: Any = mlp()
        self.first, self.middle, self.last = made[0], made[2], made[4]
        self._reentrant = reentrant
        self._times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(self._times):
            x = torch.tanh(self._run(self.middle, x))
        return self._run(self.last, x)

    def _run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self._reentrant is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self._reentrant)


OPTIONS = [
    (),
    ("static_graph",),
    ("find_unused_parameters",),
    ("static_graph", "find_unused_parameters"),
]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids="+".join)
@on_ranks("two")
def test_ddp_with_checkpoints_equals_one_process_or_raises(
    comm: Any, reentrant: bool, times: int, options: tuple[str, ...]
) -> None:
    model, alone = Checkpointed(reentrant, times), Checkpointed(None, times)
    ddp = DistributedDataParallel(model, comm, bucket_mib=SMALL, **dict.fromkeys(options, True))
    # Nested passes reach a parameter twice, or reach a parameter that seemed unused.
    if reentrant and "static_graph" not in options and (times == 2 or options):
        x, y = batches(1)[0]
        with pytest.raises(collective.GradientError, match=r"ready twice .*static_graph=True"):
            loss_of(ddp, x, y).backward()
        return
    compare(train(model, ddp, comm), train(alone, alone))


@pytest.mark.parametrize("unused", [False, True])
@on_ranks("two")
def test_ddp_with_input_gradient_penalty_equals_one_process(comm: Any, unused: bool) -> None:
    """Check a penalty on input gradients: ``torch.autograd.grad`` before the backward pass."""
    model, alone = mlp(), mlp()
    ddp = DistributedDataParallel(model, comm, bucket_mib=SMALL, find_unused_parameters=unused)
    for x, _ in batches(3):
        for module, part in ((ddp, shard(comm, x)), (alone, x)):
            module.zero_grad()
            part = part.clone().requires_grad_()
            out = module(part)
            (slope,) = torch.autograd.grad(out.sum(), part, create_graph=True)
            (out.square().mean() + slope.square().sum(1).mean()).backward()
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


# -- mixed precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks("two")
def test_ddp_with_grad_scaler_skips_overflow_step_on_all_ranks(
    comm: Any, dtype: torch.dtype
) -> None:
    """Check that an overflow on one rank makes all ranks skip the step and reduce the scale."""
    model, alone = mlp().float(), mlp().float()
    ddp = DistributedDataParallel(model, comm, bucket_mib=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    scales = []
    for step, (x, y) in enumerate(batches(4)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            out = ddp(shard(comm, x).float())
            assert out.dtype is dtype
            loss = (out.float() - shard(comm, y).float()).square().mean()
        if step == 1 and comm.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step == 3:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        unchanged = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        assert unchanged == (step == 1)
        if step == 0:
            torch.nn.functional.mse_loss(alone(x.float()), y.float()).backward()
            for a, b in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=0.05, atol=0.01)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    weights = [p.detach().reshape(-1) for p in model.parameters()]
    every = comm.all_gather(torch.cat([norm.reshape(1), *weights])[None])
    assert torch.equal(every[0], every[1])


# -- a rank that dies -----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "middle"])
def test_ddp_rank_death_in_backward_raises_peer_lost_error(shm: RankPool, where: str) -> None:
    """Check that the other rank gets its error during the pass, not after the timeout."""
    with pytest.raises(RanksFailedError) as caught:
        shm.run(dying, where, timeout=40.0, call_timeout=30.0)
    errors = caught.value.errors
    assert isinstance(errors[1], RankDiedError)
    assert "AssertionError" not in str(caught.value)
    assert "rank 1" in str(errors[0])
    assert isinstance(errors[0], collective.PeerLostError)
    # The dead rank leaves nothing behind: the pool starts new ranks that work.
    shm.run(healthy)


def dying(comm: Any, where: str) -> None:
    model: Any = mlp()
    ddp = DistributedDataParallel(model, comm, bucket_mib=SMALL)
    first, second = batches(2)
    loss_of(ddp, *first).backward()

    def die(gradient: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if comm.rank == 1:
        # Rank 1 dies before or after the first bucket is in flight.
        model[4 if where == "first" else 0].weight.register_hook(die)
    loss_of(ddp, *second).backward()


def healthy(comm: Any) -> None:
    model = mlp()
    ddp = DistributedDataParallel(model, comm, bucket_mib=SMALL)
    loss_of(ddp, *batches(1)[0]).backward()
    assert ddp.module[0].weight.grad is not None
