"""``DistributedDataParallel``, compared with one process on the joined batch."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import collective  # noqa: E402
from collective.adapters.torch import DistributedDataParallel  # noqa: E402
from collective.testing import RankPool, RanksFailedError  # noqa: E402
from tests.support.on_ranks import on_ranks, ranks_of  # noqa: E402
from tests.support.selection import in_quick, in_whole  # noqa: E402

pool = ranks_of(
    in_quick(("threads", 2)),
    ("threads", 4),
    ("shm", 2),
    ("shm", 4),
    in_whole(("gloo", 2)),
    in_whole(("gloo", 4)),
)
two = ranks_of(in_quick(("threads", 2)))


# -- models ---------------------------------------------------------------------------------------


def mlp(seed: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    return model


def batches(steps: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(rows, 6, generator=generator, dtype=torch.float64),
            torch.randn(rows, 2, generator=generator, dtype=torch.float64),
        )
        for _ in range(steps)
    ]


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def shard(comm: Any, x: torch.Tensor) -> torch.Tensor:
    return x.chunk(comm.size)[comm.rank]


def train(
    model: Any, wrapped: Any, comm: Any = None, steps: int = 4, set_to_none: bool = True
) -> list[torch.Tensor]:
    """Return the weights after some steps on this rank's shards.

    Without a communicator, train on the whole batches.
    """
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for data in batches(steps):
        x, y = data if comm is None else (shard(comm, part) for part in data)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(wrapped, x, y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def compare(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_mib", [25.0, 0.001])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks("pool")
def test_ddp_equals_one_process_on_joined_batch(
    comm: Any, bucket_mib: float, set_to_none: bool
) -> None:
    model, alone = mlp(seed=3 + comm.rank), mlp()  # the wrapper must broadcast rank 0's weights
    ddp = DistributedDataParallel(model, comm, bucket_mib=bucket_mib)
    weights = train(model, ddp, comm, 5, set_to_none)
    compare(weights, train(alone, alone, None, 5, set_to_none))
    for parameter, view in zip(ddp._trained, ddp._gradients.views):
        assert parameter.grad is view
    every = comm.all_gather(torch.cat([weight.reshape(-1) for weight in weights])[None])
    assert (every == every[0]).all()


@on_ranks("two")
def test_ddp_buckets_are_reduced_during_backward_pass(comm: Any) -> None:
    seen: list[tuple[int, int]] = []
    model = mlp()

    def reduce(bucket: Any) -> Any:
        done = sum(parameter.grad is not None for parameter in model.parameters())
        seen.append((bucket.index, done))
        return ddp._gradients.average(bucket)

    ddp = DistributedDataParallel(model, comm, bucket_mib=0.001, reduce=reduce)
    x, y = batches(1)[0]
    loss_of(ddp, x, y).backward()
    indices = [index for index, _ in seen]
    assert indices == list(range(len(ddp._gradients.buckets)))
    assert len(indices) > 2
    assert seen[0][1] < 6
    assert seen[-1][1] == 6


class Backwards(nn.Module):
    """A model that applies its layers in the reverse of their order of creation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@on_ranks("two")
def test_ddp_buckets_follow_order_of_arrival(comm: Any) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Backwards(), comm, bucket_mib=0.0001)
    assert [bucket.members for bucket in ddp._gradients.buckets] == [[0], [1], [2], [3]]
    x = torch.full((2, 8), comm.rank + 1.0)
    ddp(x).sum().backward()
    first = [parameter.grad.clone() for parameter in ddp.parameters()]
    assert [bucket.members for bucket in ddp._gradients.buckets] == [[3], [2], [1], [0]]
    for parameter, view in zip(ddp._trained, ddp._gradients.views):
        assert parameter.grad is view
    ddp.zero_grad()
    ddp(x).sum().backward()
    for parameter, before in zip(ddp.parameters(), first):
        torch.testing.assert_close(parameter.grad, before)


# -- unused parameters ----------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4).double()
        self.arms = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(3))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, x: torch.Tensor, arm: int) -> dict[str, torch.Tensor]:
        return {"out": self.arms[arm](self.trunk(x))}


@on_ranks("two")
def test_ddp_error_names_unused_parameters(comm: Any) -> None:
    ddp = DistributedDataParallel(Branches(), comm)
    x = torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(
        collective.GradientError, match=r"no gradient for .*arms\.1\.\w+.*find_unused_par"
    ):
        ddp(x, 0)["out"].sum().backward()


@on_ranks("pool")
def test_ddp_finds_unused_parameters(comm: Any) -> None:
    model = Branches()
    ddp = DistributedDataParallel(model, comm, find_unused_parameters=True, bucket_mib=0.0001)
    for _ in range(3):
        ddp.zero_grad()
        x = torch.full((2, 4), comm.rank + 1.0, dtype=torch.float64)
        ddp(x, comm.rank % 2)["out"].sum().backward()
        ones = sum(range(1, comm.size + 1))
        # Each arm's bias has a gradient of 2 from each of its ranks.
        for arm in (0, 1):
            ranks = len(range(arm, comm.size, 2))
            got = model.arms[arm].bias.grad
            assert got.item() == pytest.approx(2 * ranks / comm.size)
        assert model.arms[2].weight.grad is None  # no rank uses this arm
        got = model.trunk.weight.grad
        torch.testing.assert_close(got, torch.full_like(got, 0.5 * 2 * ones / comm.size))


# -- parameters, buffers, state and errors --------------------------------------------------------


@on_ranks("two")
def test_ddp_handles_shared_and_frozen_parameters(comm: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    model[2].weight = model[0].weight
    model[3].weight.requires_grad = False
    ddp = DistributedDataParallel(model, comm)
    assert len(ddp._trained) == 4
    frozen = model[3].weight.clone()
    ddp(torch.full((3, 4), comm.rank + 1.0)).sum().backward()
    assert model[0].weight.grad is model[2].weight.grad is not None
    assert model[3].weight.grad is None
    assert (comm.broadcast(frozen, root=0) == frozen).all()
    every = comm.all_gather(model[0].weight.grad[None])
    assert (every[0] == every[1]).all()


@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks("two")
def test_ddp_broadcasts_buffers_of_rank_0_on_request(comm: Any, broadcast: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    ddp = DistributedDataParallel(model, comm, broadcast_buffers=broadcast)
    for _ in range(2):
        ddp(torch.randn(5, 3) + comm.rank).sum().backward()
    mean = model[0].running_mean.clone()
    with torch.no_grad():
        ddp.eval()(torch.zeros(2, 3))  # evaluation makes no collective call
    ddp.train()(torch.randn(5, 3)).sum().backward()
    mean_of_rank_0 = comm.broadcast(mean, root=0)
    assert bool((mean == mean_of_rank_0).all()) == (comm.rank == 0)
    assert model[0].num_batches_tracked.item() == 3


@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks("two")
def test_ddp_without_broadcast_leaves_the_buffers_of_each_rank(comm: Any, broadcast: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].running_mean += comm.rank
    DistributedDataParallel(model, comm, broadcast_buffers=broadcast)
    assert model[0].running_mean[0].item() == (0 if broadcast else comm.rank)
    assert torch.equal(comm.broadcast(model[1].weight.detach(), root=0), model[1].weight)


@on_ranks("two")
def test_ddp_state_dict_equals_bare_module(comm: Any) -> None:
    bare, other = (nn.Sequential(mlp(seed), nn.BatchNorm1d(2)) for seed in (1, 2))
    bare[1].running_mean += 1
    ddp = DistributedDataParallel(other, comm)
    assert list(ddp.state_dict()) == list(bare.state_dict())
    ddp.load_state_dict(bare.state_dict())
    prefixed = {f"module.{name}": value for name, value in bare.state_dict().items()}
    ddp.load_state_dict(prefixed)
    for a, b in zip(other.state_dict().values(), bare.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    bare.load_state_dict(ddp.state_dict())
    outer = nn.ModuleDict({"net": ddp})
    assert next(iter(outer.state_dict())) == "net.0.0.weight"
    outer.load_state_dict(outer.state_dict())


class Versioned(nn.Linear):
    """Layer that notes the version of each state that it loads, as layers of torch.ao do."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@on_ranks("two")
def test_ddp_state_dict_keeps_versions_of_layers(comm: Any) -> None:
    bare, other = (nn.Sequential(Versioned(2, 2)) for _ in range(2))
    ddp = DistributedDataParallel(other, comm)
    bare.load_state_dict(ddp.state_dict())
    assert bare[0].loaded == 3
    ddp.load_state_dict(bare.state_dict())
    assert other[0].loaded == 3


@on_ranks("two")
def test_ddp_loads_a_state_of_buffers_alone(comm: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = DistributedDataParallel(module, comm)
    ddp.load_state_dict({"1.running_mean": torch.full((2,), 5.0)}, strict=False)
    assert module[1].running_mean.tolist() == [5.0, 5.0]


def convolutions() -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
    return model


@pytest.mark.parametrize("wrapped_first", [False, True])
@on_ranks("pool")
def test_ddp_gradients_have_the_strides_of_parameters(comm: Any, wrapped_first: bool) -> None:
    """Fused optimizers go through gradients and parameters by address."""
    module, alone = convolutions(), convolutions()
    alone.to(memory_format=torch.channels_last)
    if not wrapped_first:
        module.to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(module, comm)
    ddp.to(memory_format=torch.channels_last)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1, fused=True) for m in (ddp, alone)]
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(3):
        for model, part, optimizer in zip((ddp, alone), (shard(comm, x), x), optimizers):
            optimizer.zero_grad()
            model(part).square().mean().backward()
            optimizer.step()
    for a, b in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert a.grad.stride() == a.stride()


@on_ranks("two")
def test_ddp_of_modules_with_different_strides_raises(comm: Any) -> None:
    module = convolutions()
    if comm.rank:
        module.to(memory_format=torch.channels_last)
    differ = r"2\.weight is float64\[2, 4, 3, 3\] with axes in the order \[0, 2, 3, 1\] on rank 1"
    with pytest.raises(collective.MismatchError, match=differ):
        DistributedDataParallel(module, comm)


@on_ranks("two")
def test_ddp_of_different_models_raises(comm: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3 + comm.rank))
    differ = r"0\.bias is float32\[4\] on rank 1, but float32\[3\] on rank 0"
    with pytest.raises(collective.MismatchError, match=differ):
        DistributedDataParallel(model, comm)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + comm.rank)))
    with pytest.raises(collective.MismatchError, match=r"only rank 1 has 1\.bias"):
        DistributedDataParallel(model, comm)
    with pytest.raises(collective.InvalidArgumentError, match="no parameter"):
        DistributedDataParallel(nn.ReLU(), comm)


@on_ranks("two")
def test_mismatch_in_a_pass_of_ddp_names_the_program(comm: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    ddp = DistributedDataParallel(model, comm)
    x = torch.ones(2, 4)
    outer = nn.Sequential(ddp)  # torch calls the wrapper
    for calls in (lambda: outer(x), lambda: comm.barrier()), (
        lambda: ddp(x).sum().backward(), lambda: (comm.broadcast(torch.ones(3)), comm.barrier())
    ):  # fmt: skip
        with pytest.raises(collective.MismatchError) as caught:
            calls[comm.rank]()
        sites = re.findall(r"rank \d: .* at (.*):\d+ in", str(caught.value))
        assert sites == [__file__] * 2


def test_ddp_backward_error_ends_all_ranks(two: RankPool) -> None:
    with pytest.raises(RanksFailedError) as caught:
        two.run(broken, timeout=20.0)
    text = str(caught.value)
    assert "the third layer fails" in text
    assert "PeerFailedError" in text


def broken(comm: Any) -> None:
    ddp = DistributedDataParallel(mlp(), comm, bucket_mib=0.001)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("the third layer fails")

    if comm.rank == 1:
        ddp.module[0].weight.register_hook(fail)
    x, y = batches(1)[0]
    with comm:
        loss_of(ddp, x, y).backward()


@on_ranks("two")
def test_ddp_is_freed_without_remaining_references(comm: Any) -> None:
    model = mlp()
    ddp = DistributedDataParallel(model, comm)
    weak = weakref.ref(ddp._gradients)
    x, y = batches(1)[0]
    loss_of(ddp, x, y).backward()
    del ddp
    assert weak() is None
    loss_of(model, x, y).backward()  # the wrapper's hooks are still registered and do nothing
