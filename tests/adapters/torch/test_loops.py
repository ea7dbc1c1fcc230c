"""Manual training loops, and an optimizer whose state is sharded over the ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import collective
from collective.adapters.torch import ShardedOptimizer, sync_gradients, sync_initial_weights
from collective.errors import MismatchError, UnsupportedError
from collective.testing import run_ranks
from tests.support.on_ranks import on_ranks, ranks_of
from tests.support.selection import in_whole

pool = ranks_of(("threads", 2), ("shm", 3), in_whole(("gloo", 2)))


def model_of(seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 1))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    return model


def batch(step: int, rows: int = 12) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


# -- weights and gradients ------------------------------------------------------------------------


@on_ranks("pool")
def test_manual_loop_with_synced_gradients_equals_one_process(comm: Any) -> None:
    model, alone = model_of(1 + comm.rank), model_of(1)
    sync_initial_weights(model, comm)
    for step in range(4):
        x = batch(step)
        for module, part in ((model, x.chunk(comm.size)[comm.rank]), (alone, x)):
            module.zero_grad()
            module(part).square().mean().backward()
        sync_gradients(model, comm)
        with torch.no_grad():
            for a, b in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)
                a -= 0.1 * a.grad
                b -= 0.1 * b.grad


@on_ranks("pool")
def test_sync_initial_weights_keeps_buffer_views(comm: Any) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.arange(6.0) + comm.rank)
    model.register_buffer("head", model.table[:2])
    sync_initial_weights(model, comm)
    assert torch.equal(model.table, torch.arange(6.0))
    assert torch.equal(model.head, model.table[:2])
    assert model.head.data_ptr() == model.table.data_ptr()


@on_ranks("pool")
def test_sync_gradients_fills_gradients_missing_on_some_ranks(comm: Any) -> None:
    a, b, c, d = (nn.Parameter(torch.ones(3)) for _ in range(4))
    words = nn.Parameter(torch.zeros(4, 2))
    a.grad = torch.full((3,), comm.rank + 1.0)
    if comm.rank == 1:
        b.grad = torch.full((3,), 6.0)
        words.grad = torch.sparse_coo_tensor([[2]], torch.ones(1, 2), (4, 2), check_invariants=True)
    d.requires_grad = False
    sync_gradients([a, b, c, d, words], comm, op="sum")
    assert a.grad.tolist() == [sum(range(1, comm.size + 1))] * 3
    assert b.grad.tolist() == [6.0] * 3
    assert c.grad is None
    assert d.grad is None
    assert words.grad.to_dense().tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]


@on_ranks("pool")
def test_sync_gradients_adds_sparse_and_dense_gradients(comm: Any) -> None:
    words = nn.Parameter(torch.zeros(3, 2))
    words.grad = torch.ones(3, 2)
    if comm.rank == 0:
        words.grad = torch.sparse_coo_tensor([[2]], torch.ones(1, 2), (3, 2), check_invariants=True)
    sync_gradients([words], comm, op="sum")
    others = comm.size - 1
    assert words.grad.tolist() == [[others] * 2, [others] * 2, [others + 1] * 2]


# -- sharded optimizer state ----------------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """Optimizer that counts its steps in its groups, as many outside of PyTorch do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] / group["step"] * parameter.grad


def optimizer_of(kind: str, model: nn.Module, comm: Any = None) -> Any:
    """Return an optimizer, a sharded one if a communicator is given."""
    parameters: Any = list(model.parameters())
    options: dict[str, Any] = {"lr": 0.05}
    optimizer_class: Any = torch.optim.Adam
    if kind == "sgd":
        optimizer_class, options = torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}
    if kind == "counting":
        optimizer_class = Counting
    if kind == "groups":
        parameters = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:]}]
    if comm is None:
        return optimizer_class(parameters, **options)
    return ShardedOptimizer(parameters, optimizer_class, comm, **options)


def trained(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test_schedulers_find_the_defaults_of_the_sharded_class() -> None:
    def momenta(comm: Any = None) -> list[Any]:
        model = model_of()
        optimizer = optimizer_of("adam", model, comm)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        trained(model, optimizer, range(3), scheduler)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        return [group["betas"] for group in optimizer.param_groups]

    assert run_ranks(1, momenta) == [momenta()]


@pytest.mark.parametrize("kind", ["sgd", "adam", "groups"])
@on_ranks("pool")
def test_sharded_optimizer_equals_unsharded(comm: Any, kind: str) -> None:
    model, alone = model_of(), model_of()
    optimizers = optimizer_of(kind, model, comm), optimizer_of(kind, alone)
    for each, optimizer in zip((model, alone), optimizers):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trained(each, optimizer, range(5), scheduler)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    held, everything = (
        sum(
            value.numel()
            for state in each.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        for each in (optimizers[0]._local, optimizers[1])
    )
    assert held < 0.75 * everything
    assert comm.all_reduce(torch.tensor(held)).item() == everything


@pytest.mark.parametrize("kind", ["adam", "counting", "groups"])
@on_ranks("pool")
def test_sharded_optimizer_state_loads_on_any_number_of_ranks(comm: Any, kind: str) -> None:
    first, alone = model_of(), model_of()
    optimizer, unsharded = optimizer_of(kind, first, comm), optimizer_of(kind, alone)
    trained(first, optimizer, range(3))
    trained(alone, unsharded, range(6))
    state = copy.deepcopy(optimizer.state_dict())
    # First resume with the plain optimizer class on one rank.
    single = copy.deepcopy(first)
    resumed_alone = optimizer_of(kind, single)
    resumed_alone.load_state_dict(copy.deepcopy(state))  # the optimizer keeps and modifies it
    trained(single, resumed_alone, range(3, 6))
    # Then resume with a sharded optimizer.
    again = copy.deepcopy(first)
    resumed_spread = optimizer_of(kind, again, comm)
    resumed_spread.load_state_dict(state)
    trained(again, resumed_spread, range(3, 6))
    for model in (single, again):
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    small = ShardedOptimizer([nn.Parameter(torch.ones(1))], torch.optim.Adam, comm)
    with pytest.raises(collective.InvalidArgumentError, match="groups of"):
        small.load_state_dict(state)


@on_ranks("pool")
def test_sharded_optimizer_with_few_parameters_accepts_new_group(comm: Any) -> None:
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = ShardedOptimizer([a], torch.optim.SGD, comm, lr=1.0)
    optimizer.add_param_group({"params": [b], "lr": 0.5})
    loss = torch.tensor(3.0)

    def closure() -> torch.Tensor:
        a.grad, b.grad = torch.ones(4), torch.ones(2, dtype=torch.float64)
        return loss

    assert optimizer.step(closure) is loss
    assert a.tolist() == [0.0] * 4
    assert b.tolist() == [0.5] * 2


@on_ranks("pool")
def test_sharded_optimizer_keeps_copies_of_options_that_are_tensors(comm: Any) -> None:
    model = model_of()
    options: Any = {"lr": torch.tensor(0.05)}
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, comm, **options)
    kept, state = optimizer.keep_shards(), optimizer.state_dict()
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["lr"].fill_(5.0)  # as schedulers do
    assert state["param_groups"][0]["lr"].item() == pytest.approx(0.05)
    optimizer.restore_shards(kept)
    optimizer.param_groups[0]["lr"].fill_(5.0)
    optimizer.restore_shards(kept)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.05)


@on_ranks("pool")
def test_sharded_optimizer_calls_the_hooks_of_its_state(comm: Any) -> None:
    model, calls = model_of(), []
    optimizer: Any = ShardedOptimizer(model.parameters(), torch.optim.SGD, comm, lr=0.1)
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert calls == ["before", 1, "after"]
    assert "more" in state


@on_ranks("pool")
def test_sharded_optimizer_of_matrices_needs_no_share_on_each_rank(comm: Any) -> None:
    matrix, alone = (nn.Parameter(torch.eye(3)) for _ in range(2))
    optimizers = ShardedOptimizer([matrix], torch.optim.Muon, comm), torch.optim.Muon([alone])
    for parameter, optimizer in zip((matrix, alone), optimizers):
        parameter.grad = torch.arange(9.0).reshape(3, 3)
        optimizer.step()
    assert torch.equal(matrix, alone)


@on_ranks("pool")
def test_sharded_optimizer_with_different_parameters_raises(comm: Any) -> None:
    parameter = nn.Parameter(torch.ones(3 + (comm.rank == 1)))
    with pytest.raises(collective.MismatchError, match=r"\[4\] on rank 1, but .*\[3\] on rank 0"):
        ShardedOptimizer([parameter], torch.optim.SGD, comm, lr=1.0)


# -- parameters that change, and optimizers that are refused -------------------------------------


def _changed(comm: Any, change: str) -> str:
    model = model_of()
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, comm, lr=0.1)
    if change == "dtype" and comm.rank == 1:
        model[0].bias.data = model[0].bias.data.float()
    elif change == "frozen" and comm.rank == 1:
        model[0].bias.requires_grad_(False)
    elif change == "replaced" and comm.rank == 1:
        optimizer.param_groups[0]["params"][1] = nn.Parameter(torch.zeros(9, dtype=torch.double))
    elif change == "added" and comm.rank == 1:
        optimizer.add_param_group({"params": [("more", nn.Parameter(torch.zeros(2)))]})
    try:
        optimizer.step()
    except MismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("change", ["dtype", "frozen", "replaced", "added"])
def test_sharded_optimizer_names_a_parameter_that_one_rank_has_changed(change: str) -> None:
    for text in run_ranks(2, _changed, change):
        assert f"ShardedOptimizer: {'more' if change == 'added' else '0.bias'}" in text


@on_ranks("pool")
def test_sharded_optimizer_sends_frozen_parameters_that_it_updates(comm: Any) -> None:
    model, alone = model_of(), model_of()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, comm, lr=0.1)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for module, each in ((model, optimizer), (alone, plain)):
        module(batch(0)).square().mean().backward()
        module.requires_grad_(False)
        each.step()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)


class Clipping(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Sharpness(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter += torch.randn_like(parameter)


def _made(comm: Any, optimizer: Any) -> str:
    try:
        ShardedOptimizer(model_of().parameters(), optimizer, comm, lr=0.1)
    except UnsupportedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (torch.optim.LBFGS, "LBFGS needs a closure"),
        (Sharpness, "Sharpness needs a closure"),
        (Clipping, "Clipping updates a parameter by the gradients of other parameters"),
        (Noisy, "no error"),
        (torch.optim.Adafactor, "no error"),
    ],
)
def test_sharded_optimizer_refuses_optimizers_that_mix_parameters(
    optimizer: Any, text: str
) -> None:
    assert text in run_ranks(1, _made, optimizer)[0]


def _differing(comm: Any) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[comm.rank].weight.requires_grad_(False)
    model(torch.ones(1, 3)).sum().backward()
    try:
        sync_gradients(model, comm)
    except MismatchError as error:
        return str(error)
    return "no error"


def test_sync_gradients_of_different_parameters_names_the_first() -> None:
    for text in run_ranks(2, _differing):
        assert text.startswith("sync_gradients: the parameters of rank 1 are not those of rank 0")
        assert "only rank 1 has 0.weight" in text
