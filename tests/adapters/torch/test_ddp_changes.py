"""Parameters that change after ``DistributedDataParallel`` was made: followed, or refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from collective.adapters.torch import DistributedDataParallel, ShardedOptimizer  # noqa: E402
from collective.errors import (  # noqa: E402
    GradientError,
    InvalidArgumentError,
    MismatchError,
    PeerFailedError,
    UnsupportedError,
)
from collective.testing import RankPool, run_ranks  # noqa: E402
from tests.support.on_ranks import on_ranks, ranks_of  # noqa: E402
from tests.support.selection import in_whole  # noqa: E402

pool = ranks_of(("threads", 2), ("shm", 2))
every = ranks_of(("threads", 2), ("shm", 2), in_whole(("gloo", 2)), timeout=20.0)
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
    "transposed": (
        lambda m: setattr(m[2].weight, "data", m[2].weight.data.t().contiguous().t()),
        "2.weight took the strides (1, 2) (had (4, 1))",
    ),
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
def test_backward_pass_of_a_graph_from_before_a_change_is_reduced(comm: Any) -> None:
    model = network()
    ddp = DistributedDataParallel(model, comm)
    earlier = ddp(torch.full((1, 3), comm.rank + 1.0)).sum()
    model[0].weight.requires_grad_(True)
    later = ddp(torch.full((1, 3), comm.rank + 1.0)).sum()
    for loss in (later, earlier + 0.0 * model[0].weight.sum()):
        loss.backward()
        grads = comm.all_gather(model[2].weight.grad[None])
        assert torch.equal(grads[0], grads[1])


def _around_the_wrapper(comm: Any) -> str:
    model = network()
    ddp = DistributedDataParallel(model, comm)
    model[0].weight.requires_grad_(comm.rank == 1)
    try:
        model(torch.ones(1, 3)).sum().backward()
        ddp(torch.ones(1, 3)).sum().backward()
    except (GradientError, PeerFailedError, MismatchError) as error:
        return str(error)
    return "no error"


def test_unknown_parameter_in_a_pass_around_the_wrapper_is_named_at_all_ranks() -> None:
    for text in run_ranks(2, _around_the_wrapper):
        assert "DistributedDataParallel: 0.weight requires a gradient" in text


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


# -- comparison of the replicas ------------------------------------------------------------------


def _checked(comm: Any, fault: str) -> str:
    model = nn.Sequential(network(), nn.BatchNorm1d(2))
    ddp = DistributedDataParallel(model, comm, check=True)
    if fault == "divided":
        optimizer: Any = ShardedOptimizer(model.parameters(), torch.optim.Adam, comm)
    else:
        optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        x = torch.arange(6.0).reshape(2, 3) + comm.rank
        ddp(x).square().sum().backward()
        if comm.rank == 1 and step == 1 and fault == "weight":
            model[0][2].weight.data += 1e-6
        if comm.rank == 1 and step == 1 and fault == "state":
            optimizer.state[model[0][2].bias]["exp_avg_sq"][0] += 1e-3
        try:
            optimizer.step()
        except MismatchError as error:
            return f"{step}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("none", "no error"),
        ("divided", "no error"),
        ("weight", "1: DistributedDataParallel: the values of 0.2.weight on rank 1 differ"),
        ("state", "1: DistributedDataParallel: the values of 0.2.bias on rank 1 differ"),
    ],
)
def test_check_names_the_first_tensor_that_differs_after_a_step(
    two: RankPool, fault: str, text: str
) -> None:
    assert all(each.startswith(text) for each in two.run(_checked, fault))


def _checked_shards(comm: Any) -> str:
    model = nn.BatchNorm1d(3)
    ddp = DistributedDataParallel(model, comm, shards=2, check=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for _ in ddp.each_shard():
        ddp(torch.randn(4, 3)).sum().backward()
    if comm.rank == 1:
        model.running_mean += 1
    try:
        optimizer.step()
    except MismatchError as error:
        return str(error)
    return "no error"


def test_check_with_shards_compares_the_buffers(two: RankPool) -> None:
    for text in two.run(_checked_shards):
        assert "the values of running_mean on rank 1 differ from those on rank 0" in text


class WritesData(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data *= 0.9
        return super().forward(x)


def _writes(comm: Any) -> str:
    ddp = DistributedDataParallel(WritesData(3, 1), comm, shards=2, check=True)
    try:
        for _ in ddp.each_shard():
            ddp(torch.ones(1, 3)).sum().backward()
    except UnsupportedError as error:
        return str(error)
    return "no error"


def test_check_with_shards_finds_weights_that_a_pass_writes() -> None:
    assert "parameter weight was written" in run_ranks(1, _writes)[0]


def _renormalised(comm: Any) -> str:
    try:
        DistributedDataParallel(nn.Embedding(4, 2, max_norm=1.0), comm)
    except UnsupportedError as error:
        return str(error)
    return "no error"


def test_embedding_with_max_norm_is_refused_on_several_ranks() -> None:
    assert run_ranks(1, _renormalised) == ["no error"]
    for text in run_ranks(2, _renormalised):
        assert "the module has max_norm=1.0" in text
