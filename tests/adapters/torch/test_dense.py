"""Gradients of dense layers that are computed in their buckets are those of PyTorch, bit by bit.

Each program is run with a module as it is and with a wrapped one, on two ranks with the same data,
so that averages are exact; whatever it returns, and the gradients that it leaves, have to be equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from collective.adapters.torch import DistributedDataParallel
from collective.adapters.torch.dense import dense_weights
from collective.testing import run_ranks

WIDTH = 512  # a weight of 1 MiB, the smallest that is computed in its bucket


class Net(nn.Module):
    """Two dense layers, and what a program makes of them in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(1)  # ranks are threads, and share torch's own
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / WIDTH**0.5

    def forward(self, x: Any, how: Callable[..., Any] | None = None) -> Any:
        if how is not None:
            return how(self, x)
        return self.second(torch.tanh(self.first(x)))


def batch(seed: int = 2, *shape: int) -> Any:
    return torch.randn(*(shape or (3,)), WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, x: Any, how: Any = None) -> Any:
    return model(x, how).square().mean()


# -- programs: of a module, wrapped or not, and the bare one inside -----------------------------


def once(model: Any, net: Net) -> None:
    loss_of(model, batch()).backward()


def three_dimensions(model: Any, net: Net) -> None:
    loss_of(model, batch(2, 2, 3)).backward()


def an_input_with_a_gradient(model: Any, net: Net) -> Any:
    x = batch().requires_grad_()
    loss_of(model, x).backward()
    return x.grad


def a_layer_twice(model: Any, net: Net) -> None:
    loss_of(model, batch(), lambda net, x: net.second(net.first(net.second(x)))).backward()


def two_forward_passes_and_one_backward(model: Any, net: Net) -> None:
    (loss_of(model, batch(2)) + loss_of(model, batch(3))).backward()


def a_pass_twice(model: Any, net: Net) -> None:
    loss = loss_of(model, batch())
    loss.backward(retain_graph=True)
    loss.backward()


def two_passes_that_add_up(model: Any, net: Net) -> None:
    with model.no_sync() if model is not net else contextlib.nullcontext():
        loss_of(model, batch(2)).backward()
    loss_of(model, batch(3)).backward()


def gradients_that_are_asked_for(model: Any, net: Net) -> Any:
    found = torch.autograd.grad(loss_of(model, batch(2)), list(net.parameters()))
    loss_of(model, batch(3)).backward()  # must not write over what was handed out
    return found


def some_parameters_only(model: Any, net: Net) -> None:
    loss_of(model, batch()).backward(inputs=list(net.parameters()))


def second_derivatives(model: Any, net: Net) -> Any:
    gradients = torch.autograd.grad(
        loss_of(model, batch(2)), list(net.parameters()), create_graph=True
    )
    sum(each.square().sum() for each in gradients).backward()
    return [each.detach() for each in gradients]


def a_hook_that_keeps_gradients(model: Any, net: Net) -> Any:
    kept: list[Any] = []
    net.first.weight.register_hook(kept.append)
    loss_of(model, batch(2)).backward()
    net.zero_grad()
    loss_of(model, batch(3)).backward()
    return kept


def checkpoints(model: Any, net: Net) -> None:
    def how(net: Net, x: Any) -> Any:
        return net.second(checkpoint(lambda x: torch.tanh(net.first(x)), x, use_reentrant=False))

    loss_of(model, batch(), how).backward()


def a_reentrant_checkpoint_of_a_layer_that_is_used_outside(model: Any, net: Net) -> None:
    def how(net: Net, x: Any) -> Any:
        return net.first(checkpoint(net.first, net.second(x), use_reentrant=True))

    for _ in range(2):
        net.zero_grad()
        loss_of(model, batch().requires_grad_(), how).backward()


def autocast(model: Any, net: Net) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch())
    loss.backward()


def a_tied_weight(model: Any, net: Net) -> None:
    def how(net: Net, x: Any) -> Any:
        return net.second(net.first(x)) + functional.embedding(torch.arange(3), net.first.weight)

    loss_of(model, batch(), how).backward()


def another_pass_after_one_that_broke_off(model: Any, net: Net) -> None:
    def how(net: Net, x: Any) -> Any:
        h = net.first(x)
        if h.requires_grad:
            h.register_hook(lambda _: 1 / 0)
        return net.second(h)

    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(2), how).backward()
    net.zero_grad()
    if model is not net:
        with contextlib.suppress(Exception):  # the wrapper refuses one forward pass
            model(batch())
        net.zero_grad()
    for _ in range(2):
        net.zero_grad()
        loss_of(model, batch(3)).backward()


PROGRAMS = [
    once, three_dimensions, an_input_with_a_gradient, a_layer_twice,
    two_forward_passes_and_one_backward, a_pass_twice, two_passes_that_add_up,
    gradients_that_are_asked_for, some_parameters_only, second_derivatives,
    a_hook_that_keeps_gradients, checkpoints,
    a_reentrant_checkpoint_of_a_layer_that_is_used_outside, autocast, a_tied_weight,
    another_pass_after_one_that_broke_off,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_without_the_wrapper(program: Callable[..., Any]) -> None:
    def ours(comm: Any) -> Any:
        torch.set_num_threads(1)
        net = Net()
        static = "reentrant" in program.__name__
        found = program(DistributedDataParallel(net, comm, static_graph=static), net)
        return found, [parameter.grad.clone() for parameter in net.parameters()]

    net = Net()
    # With several threads a product of matrices is shared among as many as are free.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = program(net, net)
    torch.set_num_threads(threads)
    for found, gradients in run_ranks(2, ours):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for gradient, parameter in zip(gradients, net.parameters()):
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=0)


def test_the_gradient_of_a_large_weight_is_in_its_bucket_before_the_wrapper_sees_it() -> None:
    def ours(comm: Any) -> tuple[list[int], list[int]]:
        net = Net()
        seen: list[int] = []
        for each in net.parameters():  # before the wrapper's own hooks
            each.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
        wrapped = DistributedDataParallel(net, comm)
        for _ in range(2):
            seen.clear()
            net.zero_grad()
            loss_of(wrapped, batch()).backward()
        return seen, [p.grad.data_ptr() for p in (net.second.weight, net.first.weight)]

    ((seen, final),) = run_ranks(1, ours)
    assert [address for address in seen if address in final] == final


@pytest.mark.parametrize("width", [8, WIDTH])
def test_only_large_weights_of_dense_layers_are(width: int) -> None:
    layers = nn.Sequential(nn.Linear(width, width), nn.Conv1d(width, width, 3), nn.ReLU())
    found = dense_weights(layers, list(layers.parameters()))
    assert list(found) == ([id(layers[0].weight)] if width == WIDTH else [])


def test_compiled_modules_are_compiled_whole() -> None:
    """The compiler sees no more than without it: ``fullgraph`` refuses what it cannot read."""

    def ours(comm: Any) -> list[Any]:
        net = Net()
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        loss_of(DistributedDataParallel(compiled, comm), batch()).backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    net = Net()
    once(net, net)
    ((*gradients,),) = run_ranks(1, ours)
    for gradient, parameter in zip(gradients, net.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-7)
