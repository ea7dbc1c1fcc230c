"""``DistributedDataParallel`` with forward and backward passes that do not alternate.

A program is a list of steps, such as two forward passes, one of them in ``no_sync()``, and then
the backward pass of either. The expected gradients are computed without the wrapper: this process
has one replica for each rank. It averages the gradients if a backward pass goes through a forward
pass outside ``no_sync()``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import collective
from collective.adapters.torch import DistributedDataParallel
from collective.testing import RankPool
from tests.support.on_ranks import on_ranks, ranks_of

SIZE = 2
two = ranks_of(("threads", SIZE))


class Net(nn.Module):
    """A network that skips layers in turn or recomputes them in the backward pass, by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4).double()
        self.arms = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(3))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.kind = kind
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).double()

    def forward(self, x: torch.Tensor, arm: int) -> dict[str, Any]:
        x = torch.tanh(self.first(x))
        if self.kind == "unused":
            x = self.arms[arm % 3](x)
        else:
            for layer in self.arms:
                x = torch.tanh(self._layer(layer, x))
        return {"out": [x * self.scale]}

    def _layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("plain", "unused") or not x.requires_grad:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.kind == "reentrant")


OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "non-reentrant": {},
    "reentrant": {"static_graph": True},
}


def input_of(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


class Replica:
    """One rank's part in a program.

    Attributes:
        pending: for each forward pass with an unused graph, its loss and whether the pass ran
            outside ``no_sync()``.
    """

    def __init__(self, net: Net, wrapped: Any, rank: int) -> None:
        self.net, self.wrapped, self.rank = net, wrapped, rank
        self.pending: list[tuple[torch.Tensor, bool]] = []
        self._passes = 0

    def do(self, step: tuple[Any, ...]) -> bool:
        """Run a step; return whether its gradients must be reduced."""
        return bool(getattr(self, step[0])(*step[1:]))

    def _forward(self, reduced: bool, sign: int = 1) -> torch.Tensor:
        self._passes += 1
        unreduced = self.wrapped is not self.net and not reduced
        with self.wrapped.no_sync() if unreduced else contextlib.nullcontext():
            x = input_of(self._passes, self.rank)
            return sign * self.wrapped(x, self._passes + self.rank)["out"][0].sum()

    def forward(self, reduced: bool) -> None:
        self.pending.append((self._forward(reduced), reduced))

    def dropped(self, reduced: bool) -> None:
        self._forward(reduced)

    def evaluate(self) -> None:
        with torch.no_grad():
            self._forward(True)

    def _take(self, which: list[int], retain: bool) -> list[tuple[torch.Tensor, bool]]:
        numbers = {number % len(self.pending) for number in which} if self.pending else set()
        passes = [self.pending[number] for number in sorted(numbers)]
        if not retain:
            self.pending = [item for item in self.pending if item not in passes]
        return passes

    def backward(self, which: list[int], retain: bool, within: bool) -> bool:
        passes = self._take(which, retain)
        if not passes:
            return False
        no_sync = within and self.wrapped is not self.net
        with self.wrapped.no_sync() if no_sync else contextlib.nullcontext():
            sum(loss for loss, _ in passes).backward(retain_graph=retain)
        return any(reduced for _, reduced in passes)

    def derivative(self, which: int) -> None:
        for loss, _ in self._take([which], True):
            torch.autograd.grad(loss, list(self.net.parameters()), retain_graph=True,
                                allow_unused=True)  # fmt: skip

    def zero_grad(self, set_to_none: bool) -> None:
        self.wrapped.zero_grad(set_to_none=set_to_none)

    def descend(self) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.net.parameters()]


def average(replicas: list[Replica]) -> None:
    for every in zip(*(replica.net.parameters() for replica in replicas)):
        known = [p.grad for p in every if p.grad is not None]
        if known:
            mean = sum(known) / len(every)
            for parameter in every:
                parameter.grad = mean.clone()


def expected(kind: str, program: list[Any], size: int = SIZE) -> list[list[Any]]:
    """Return the gradients of each rank after each step."""
    nets = [Net(kind) for _ in range(size)]
    replicas = [Replica(net, net, rank) for rank, net in enumerate(nets)]
    gradients: list[list[Any]] = [[] for _ in replicas]
    for step in program:
        reduced = [replica.do(step) for replica in replicas]
        if any(reduced):
            average(replicas)
        for own, replica in zip(gradients, replicas, strict=True):
            own.append(replica.gradients())
    return gradients


def run(comm: Any, kind: str, program: list[Any]) -> list[Any]:
    net = Net(kind)
    # Buckets are so small that there are several.
    ddp = DistributedDataParallel(net, comm, bucket_mib=0.0001, **OPTIONS[kind])
    return after_each(Replica(net, ddp, comm.rank), program)


def after_each(replica: Replica, program: list[Any]) -> list[Any]:
    """Return the gradients of one rank after each step."""
    gradients = []
    for step in program:
        replica.do(step)
        gradients.append(replica.gradients())
    return gradients


def check(two: RankPool, kind: str, program: list[Any]) -> None:
    for rank, gradients in enumerate(two.run(run, kind, program)):
        for step, own, reference in zip(
            program, gradients, expected(kind, program)[rank], strict=True
        ):
            for a, b in zip(own, reference, strict=True):
                assert (a is None) == (b is None), step
                if a is not None:
                    torch.testing.assert_close(
                        a, b, rtol=1e-10, atol=1e-10, msg=lambda text, at=step: f"{at}: {text}"
                    )


def forward(reduced: bool) -> tuple[Any, ...]:
    return "forward", reduced


def backward(*which: int, retain: bool = False, within: bool = False) -> tuple[Any, ...]:
    return "backward", list(which), retain, within


# The number of a backward pass counts the pending graphs only, not the graphs already used.
PROGRAMS: dict[str, list[tuple[Any, ...]]] = {
    "no_sync forward while a synced one is pending": [
        forward(True), forward(False), backward(0), backward(0),
    ],
    "no_sync backward first": [forward(True), forward(False), backward(1), backward(0)],
    "no_sync backward last": [forward(False), forward(True), backward(1), backward(0)],
    "accumulated": [
        forward(False), backward(0), forward(False), backward(0), forward(True), backward(0),
    ],
    "two synced forwards": [forward(True), forward(True), backward(1), backward(0)],
    "backward twice": [forward(True), backward(0, retain=True), backward(0)],
    "sum of synced and no_sync losses": [forward(True), forward(False), backward(0, 1)],
    "sum of no_sync and synced losses": [forward(False), forward(True), backward(0, 1)],
    "backward within no_sync": [forward(True), backward(0, within=True)],
    "forward without backward": [("dropped", True), forward(True), backward(0)],
    "no_sync forward after one without backward": [("dropped", True), forward(False), backward(0)],
    "autograd.grad": [forward(True), ("derivative", 0), backward(0)],
}  # fmt: skip
# Reentrant checkpoints support neither a backward pass of several graphs nor autograd.grad.
NOT_REENTRANT = (
    "sum of synced and no_sync losses",
    "sum of no_sync and synced losses",
    "autograd.grad",
)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ddp_gradients_after_listed_passes_are_right(two: RankPool, kind: str, name: str) -> None:
    if kind != "reentrant" or name not in NOT_REENTRANT:
        check(two, kind, PROGRAMS[name])


_number = st.integers(0, 5)
_forward = st.tuples(st.just("forward"), st.booleans())
_backward = st.tuples(
    st.just("backward"), st.lists(_number, min_size=1, max_size=1), st.booleans(), st.booleans()
)
_sum = st.tuples(
    st.just("backward"), st.lists(_number, min_size=2, max_size=3), st.booleans(), st.booleans()
)
_others = [
    st.tuples(st.just("dropped"), st.booleans()),
    st.tuples(st.just("evaluate")),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("descend")),
]


@pytest.mark.parametrize("kind", OPTIONS)
def test_ddp_gradients_in_any_order_of_passes_are_right(two: RankPool, kind: str) -> None:
    steps = 4 * [_forward] + 4 * [_backward] + _others
    if kind != "reentrant":
        steps += [_sum, _sum, st.tuples(st.just("derivative"), _number)]

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.one_of(steps), min_size=4, max_size=15))
    def search(program: list[Any]) -> None:
        check(two, kind, program)

    search()


# -- losses that bypass the module's output -----------------------------------------------------


class Stashing(nn.Module):
    """A module that stores its loss in an attribute and returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        nn.init.ones_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> None:
        self.loss = self.layer(x).sum()


def differ(comm: Any, module: nn.Module) -> bool:
    """Return whether the ranks' gradients differ."""
    flat = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    every = comm.all_gather(flat[None])
    return not bool((every == every[0]).all())


@pytest.mark.parametrize("unused", [False, True])
@on_ranks("two")
def test_ddp_loss_outside_output_is_reduced(comm: Any, unused: bool) -> None:
    net = Stashing()
    ddp = DistributedDataParallel(net, comm, find_unused_parameters=unused)
    for reduced in (True, False, True, True, False):
        ddp.zero_grad()
        with contextlib.nullcontext() if reduced else ddp.no_sync():
            ddp(input_of(1, comm.rank))
        net.loss.backward()
        assert differ(comm, net) == (not reduced)
    # The wrapper cannot know which forward pass a loss belongs to. It reduces each time, and the
    # final gradient is right.
    ddp.zero_grad()
    ddp(input_of(1, comm.rank))
    first_loss = net.loss
    with ddp.no_sync():
        ddp(input_of(2, comm.rank))
    net.loss.backward()
    first_loss.backward()
    expect = sum(input_of(number, rank).sum(0) for number in (1, 2) for rank in (0, 1)) / 2
    torch.testing.assert_close(net.layer.weight.grad, expect[None])


@on_ranks("two")
def test_ddp_second_derivative_without_output_in_loss_is_reduced(comm: Any) -> None:
    """Check a loss without the output, after the output has been freed."""
    net = Net("unused")
    ddp = DistributedDataParallel(net, comm, find_unused_parameters=True)
    for reduced in (True, False, True):
        ddp.zero_grad()
        x = input_of(1, comm.rank).requires_grad_()
        with contextlib.nullcontext() if reduced else ddp.no_sync():
            (slope,) = torch.autograd.grad(ddp(x, 0)["out"][0].sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert differ(comm, net) == (not reduced)


@on_ranks("two")
def test_ddp_module_called_directly_is_reduced(comm: Any) -> None:
    net = Net("plain")
    ddp = DistributedDataParallel(net, comm)
    for reduced in (True, False, True):
        ddp.zero_grad()
        loss = net(input_of(1, comm.rank), 0)["out"][0].sum()
        with contextlib.nullcontext() if reduced else ddp.no_sync():
            loss.backward()
        assert differ(comm, net) == (not reduced)


class Last(nn.Module):
    """A module whose bias gets its gradient before the checkpoint recomputes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4, bias=False).double()
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        nn.init.ones_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square() + self.bias


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks("two")
def test_ddp_inside_checkpoint_is_reduced(comm: Any, reentrant: bool) -> None:
    net, alone = Last(), Last()
    ddp = DistributedDataParallel(net, comm)
    for _ in range(2):
        x = input_of(1, comm.rank).requires_grad_()
        checkpoint(ddp, x, use_reentrant=reentrant).sum().backward()
    for _ in range(2):
        (alone(torch.cat([input_of(1, rank) for rank in range(SIZE)])).sum() / SIZE).backward()
    for a, b in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# -- unused parameters ----------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(3, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor, which: list[int]) -> list[torch.Tensor]:
        return [(self.weights[number] * x).sum() for number in which]


@on_ranks("two")
def test_ddp_output_missing_from_loss_leaves_parameter_unused(comm: Any) -> None:
    net = Two()
    ddp = DistributedDataParallel(net, comm, find_unused_parameters=True)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((3,), comm.rank + 1.0), [0, 1])[0].backward()
        assert net.weights[0].grad.tolist() == [1.5] * 3
        assert net.weights[1].grad is None


@on_ranks("two")
def test_ddp_parameter_used_only_in_no_sync_is_reduced_on_all_ranks(comm: Any) -> None:
    net = Two()
    ddp = DistributedDataParallel(net, comm, find_unused_parameters=True)
    x = torch.full((3,), 4.0)
    if comm.rank == 0:
        with ddp.no_sync():
            ddp(x, [1])[0].backward()
    ddp(x, [0])[0].backward()
    assert net.weights[1].grad.tolist() == [2.0] * 3


@on_ranks("two")
def test_ddp_rank_without_used_parameters_takes_part(comm: Any) -> None:
    net = Two()
    ddp = DistributedDataParallel(net, comm, find_unused_parameters=True)
    for _ in range(2):
        ddp.zero_grad()
        x = torch.ones(3, requires_grad=True)
        outputs = ddp(x, [0] * comm.rank)
        if comm.rank:
            outputs[0].backward()
        else:
            assert outputs == []
        assert net.weights[0].grad.tolist() == [0.5] * 3
        assert net.weights[1].grad is None


@on_ranks("two")
def test_ddp_parameter_used_outside_forward_is_reduced(comm: Any) -> None:
    """Check a parameter whose gradient arrives before the backward pass reaches the output."""
    net = Two()
    ddp = DistributedDataParallel(net, comm, find_unused_parameters=True)
    for reduced in (True, False, True):
        ddp.zero_grad()
        x = torch.full((3,), comm.rank + 1.0)
        with contextlib.nullcontext() if reduced else ddp.no_sync():
            (loss,) = ddp(x, [0])
        (loss + (net.weights[1] * x).sum()).backward()
        assert differ(comm, net) == (not reduced)


# -- passes that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
@on_ranks("two")
def test_ddp_failed_pass_makes_next_pass_raise(comm: Any, static: bool) -> None:
    net = Net("plain")
    ddp = DistributedDataParallel(net, comm, bucket_mib=0.0001, static_graph=static)

    def loss() -> torch.Tensor:
        total: torch.Tensor = ddp(input_of(1, comm.rank), 0)["out"][0].sum()
        return total

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("on purpose")

    retained = loss()
    for again in (loss, lambda: retained.backward(retain_graph=True)):
        handle = net.first.weight.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose") as caught:
            retained.backward(retain_graph=True)
        handle.remove()
        with pytest.raises(collective.GradientError, match="backward pass did not finish"):
            again()
        ddp.zero_grad()
        loss().backward()
        assert not differ(comm, net)
        assert caught.value.__traceback__ is not None  # keeps the objects in its frames alive


# -- join -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ("FFBB", "a forward pass had no backward pass"),
        ("FBB", "a second backward pass"),
        ("FBF", "a forward pass had no backward pass"),
    ],
)
@on_ranks("two")
def test_ddp_join_with_unpaired_passes_raises(comm: Any, steps: str, text: str) -> None:
    ddp = DistributedDataParallel(Two(), comm)

    def train() -> None:
        losses: list[Any] = []
        with ddp.join():
            for step in steps:
                if step == "F":
                    losses.append(sum(ddp(torch.ones(3), [0, 1])))
                else:
                    losses[-1].backward(retain_graph=True)

    with pytest.raises(collective.GradientError, match=text):
        train()
