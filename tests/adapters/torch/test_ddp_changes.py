"""Parameters that change after ``DistributedDataParallel`` was made: followed, or refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from collective.adapters.torch import DistributedDataParallel  # noqa: E402
from collective.errors import InvalidArgumentError, MismatchError  # noqa: E402
from collective.testing import RankPool  # noqa: E402
from tests.support.on_ranks import on_ranks, ranks_of  # noqa: E402

pool = ranks_of(("threads", 2), ("shm", 2))
every = ranks_of(("threads", 2), ("shm", 2), ("gloo", 2), timeout=20.0)
two = ranks_of(("threads", 2))


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    model[0].weight.requires_grad_(False)
    return model


def assign(model: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


CHANGES: dict[str, tuple[Any, str]] = {
    "unfrozen": (lambda m: m[0].weight.requires_grad_(True), "0.weight now requires a gradient"),
    "frozen": (lambda m: m[2].bias.requires_grad_(False), "2.bias no longer requires a gradient"),
    "all frozen": (lambda m: m.requires_grad_(False), "0.bias no longer requires a gradient"),
    "layer": (lambda m: m.__setitem__(2, nn.Linear(4, 2)), "2.weight was replaced"),
    "assigned": (assign, "0.weight was replaced"),
    "added": (lambda m: m.append(nn.Linear(2, 2)), "3.weight was added"),
    "in an empty part": (
        lambda m: m[1].register_parameter("own", nn.Parameter(torch.ones(2), False)),
        "1.own was added",
    ),
    "removed": (lambda m: m[2].register_parameter("bias", None), "2.bias was removed"),
    "dtype": (lambda m: m.double(), "0.weight became float64[4, 3] on cpu (was float32[4, 3]"),
    "normalised": (lambda m: nn.utils.parametrizations.weight_norm(m[2]), "2.weight was removed"),
}


def train(model: Any, wrapped: Any, rank: int) -> None:
    """Make a step; the ranks have different samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((2, 3), rank + 1.0, dtype=model[0].weight.dtype).requires_grad_()
    optimizer.zero_grad()
    wrapped(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
@on_ranks("pool")
def test_change_on_all_ranks_is_followed(comm: Any, change: str) -> None:
    model = network()
    ddp = DistributedDataParallel(model, comm)
    train(model, ddp, comm.rank)
    CHANGES[change][0](model)
    for _ in range(2):
        train(model, ddp, comm.rank)
    for name, parameter in model.named_parameters():
        both = comm.all_gather(parameter.detach()[None])
        assert torch.equal(both[0], both[1]), name
        if parameter.requires_grad:
            assert parameter.grad.abs().sum() > 0, name


def test_followed_parameters_get_the_average_of_the_gradients(two: RankPool) -> None:
    def on_a_rank(comm: Any) -> Any:
        model = network()
        ddp = DistributedDataParallel(model, comm)
        model[0].weight.requires_grad_(True)
        ddp(torch.full((2, 3), comm.rank + 1.0)).sum().backward()
        return model[0].weight.grad.clone()

    model = network().requires_grad_(True)
    model(torch.tensor([[1.0] * 3, [2.0] * 3])).sum().backward()
    for grad in two.run(on_a_rank):
        torch.testing.assert_close(grad, model[0].weight.grad)


def _changed_on_rank_1(comm: Any, change: str) -> str:
    model = network()
    ddp = DistributedDataParallel(model, comm)
    train(model, ddp, comm.rank)
    if comm.rank == 1:
        CHANGES[change][0](model)
    with pytest.raises(MismatchError) as caught:
        train(model, ddp, comm.rank)
    return str(caught.value)


@pytest.mark.parametrize("change", CHANGES)
def test_change_on_one_rank_raises_at_all_ranks_and_names_it(two: RankPool, change: str) -> None:
    for text in two.run(_changed_on_rank_1, change):
        assert "DistributedDataParallel: " in text
        assert CHANGES[change][1] in text


def test_change_on_one_rank_is_named_over_each_transport(every: RankPool) -> None:
    for text in every.run(_changed_on_rank_1, "unfrozen"):
        assert "0.weight now requires a gradient" in text


@on_ranks("two")
def test_module_frozen_for_a_pass_keeps_its_buckets(comm: Any) -> None:
    model = network().requires_grad_(True)
    ddp = DistributedDataParallel(model, comm)
    train(model, ddp, comm.rank)
    engine = ddp._gradients
    for frozen in (True, False):
        model.requires_grad_(not frozen)
        x = torch.ones(1, 3, requires_grad=True)
        ddp(x).sum().backward()
        assert x.grad is not None
    assert ddp._gradients is engine
    assert model[2].weight.grad is engine.views[1]


@on_ranks("two")
def test_parameters_that_only_move_or_lend_their_place_are_not_followed(comm: Any) -> None:
    model = network()
    ddp = DistributedDataParallel(model, comm)
    engine = ddp._gradients
    prune.l1_unstructured(model[2], "weight", amount=0.5)
    train(model, ddp, comm.rank)
    lent = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ddp.no_sync():
        torch.func.functional_call(ddp, {f"module.{n}": p for n, p in lent.items()}, torch.ones(3))
    train(model, ddp, comm.rank)
    assert ddp._gradients is engine


@on_ranks("two")
def test_change_in_no_sync_is_followed_by_the_next_reduced_pass(comm: Any) -> None:
    model = network()
    ddp = DistributedDataParallel(model, comm)
    model[0].weight.requires_grad_(True)
    with ddp.no_sync():
        ddp(torch.ones(1, 3)).sum().backward()
    local = model[0].weight.grad.clone()
    ddp(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
    other = network().requires_grad_(True)
    other(torch.tensor([[1.0] * 3, [2.0] * 3])).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, local + other[0].weight.grad / 2)


@on_ranks("two")
def test_rebind_takes_the_present_parameters(comm: Any) -> None:
    model = network()
    ddp = DistributedDataParallel(model, comm)
    model[0].weight.requires_grad_(True)
    ddp.rebind(comm)
    train(model, ddp, comm.rank)
    assert len(ddp._trained) == 4


@on_ranks("two")
def test_parameter_that_is_not_initialised_is_refused_by_name(comm: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"0\.weight is not initialised"):
        DistributedDataParallel(nn.Sequential(nn.LazyLinear(3)), comm)


def _buffer(comm: Any) -> str:
    model = nn.BatchNorm1d(3)
    ddp = DistributedDataParallel(model, comm)
    if comm.rank == 1:
        model.register_buffer("mask", torch.ones(3))
    with pytest.raises(MismatchError) as caught:
        ddp(torch.ones(2, 3))
    return str(caught.value)


def test_buffer_of_one_rank_is_named_at_all_ranks(two: RankPool) -> None:
    assert all("'mask'" in text for text in two.run(_buffer))
