"""Gradients of dense layers that are computed in their buckets, compared bit by bit with PyTorch.

Each program runs with a bare module and with a wrapped module. The wrapped module runs on two ranks
with the same data, so averages are exact. The program's results and gradients must be equal.
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

WIDTH = 512  # a weight of 1 MiB, the smallest size whose gradient is computed in its bucket


class Net(nn.Module):
    """Two dense layers; a program may pass a function that ``forward`` applies to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(1)  # thread ranks share torch's default generator
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


# -- programs with two arguments: a module that may be wrapped, and the bare module inside ------


def once(model: Any, net: Net) -> None:
    loss_of(model, batch()).backward()


def three_dimensions(model: Any, net: Net) -> None:
    loss_of(model, batch(2, 2, 3)).backward()


def input_with_gradient(model: Any, net: Net) -> Any:
    x = batch().requires_grad_()
    loss_of(model, x).backward()
    return x.grad


def layer_used_twice(model: Any, net: Net) -> None:
    loss_of(model, batch(), lambda net, x: net.second(net.first(net.second(x)))).backward()


def two_forward_passes_and_one_backward(model: Any, net: Net) -> None:
    (loss_of(model, batch(2)) + loss_of(model, batch(3))).backward()


def backward_twice(model: Any, net: Net) -> None:
    loss = loss_of(model, batch())
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated_passes(model: Any, net: Net) -> None:
    with model.no_sync() if model is not net else contextlib.nullcontext():
        loss_of(model, batch(2)).backward()
    loss_of(model, batch(3)).backward()


def autograd_grad(model: Any, net: Net) -> Any:
    gradients = torch.autograd.grad(loss_of(model, batch(2)), list(net.parameters()))
    loss_of(model, batch(3)).backward()  # must not overwrite the gradients returned above
    return gradients


def backward_with_inputs(model: Any, net: Net) -> None:
    loss_of(model, batch()).backward(inputs=list(net.parameters()))


def second_derivatives(model: Any, net: Net) -> Any:
    gradients = torch.autograd.grad(
        loss_of(model, batch(2)), list(net.parameters()), create_graph=True
    )
    sum(gradient.square().sum() for gradient in gradients).backward()
    return [gradient.detach() for gradient in gradients]


def hook_keeping_gradients(model: Any, net: Net) -> Any:
    gradients: list[Any] = []
    net.first.weight.register_hook(gradients.append)
    loss_of(model, batch(2)).backward()
    net.zero_grad()
    loss_of(model, batch(3)).backward()
    return gradients


def checkpoints(model: Any, net: Net) -> None:
    def how(net: Net, x: Any) -> Any:
        return net.second(checkpoint(lambda x: torch.tanh(net.first(x)), x, use_reentrant=False))

    loss_of(model, batch(), how).backward()


def reentrant_checkpoint_of_reused_layer(model: Any, net: Net) -> None:
    def how(net: Net, x: Any) -> Any:
        return net.first(checkpoint(net.first, net.second(x), use_reentrant=True))

    for _ in range(2):
        net.zero_grad()
        loss_of(model, batch().requires_grad_(), how).backward()


def autocast(model: Any, net: Net) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch())
    loss.backward()


def tied_weight(model: Any, net: Net) -> None:
    def how(net: Net, x: Any) -> Any:
        return net.second(net.first(x)) + functional.embedding(torch.arange(3), net.first.weight)

    loss_of(model, batch(), how).backward()


def pass_after_failed_pass(model: Any, net: Net) -> None:
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
    once, three_dimensions, input_with_gradient, layer_used_twice,
    two_forward_passes_and_one_backward, backward_twice, accumulated_passes,
    autograd_grad, backward_with_inputs, second_derivatives,
    hook_keeping_gradients, checkpoints,
    reentrant_checkpoint_of_reused_layer, autocast, tied_weight,
    pass_after_failed_pass,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_ddp_dense_gradients_equal_those_without_wrapper(program: Callable[..., Any]) -> None:
    def run(comm: Any) -> Any:
        torch.set_num_threads(1)
        net = Net()
        static = "reentrant" in program.__name__
        result = program(DistributedDataParallel(net, comm, static_graph=static), net)
        return result, [parameter.grad.clone() for parameter in net.parameters()]

    net = Net()
    # With several threads the partition of a matrix product depends on how many threads are free.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = program(net, net)
    torch.set_num_threads(threads)
    for result, gradients in run_ranks(2, run):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        for gradient, parameter in zip(gradients, net.parameters()):
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=0)


def test_ddp_large_weight_gradient_is_computed_in_bucket() -> None:
    def run(comm: Any) -> tuple[list[int], list[int]]:
        net = Net()
        seen: list[int] = []
        for parameter in net.parameters():  # these hooks run before the wrapper's hooks
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
        wrapped = DistributedDataParallel(net, comm)
        for _ in range(2):
            seen.clear()
            net.zero_grad()
            loss_of(wrapped, batch()).backward()
        return seen, [p.grad.data_ptr() for p in (net.second.weight, net.first.weight)]

    ((seen, final),) = run_ranks(1, run)
    assert [address for address in seen if address in final] == final


@pytest.mark.parametrize("width", [8, WIDTH])
def test_dense_weights_selects_only_large_dense_weights(width: int) -> None:
    layers = nn.Sequential(nn.Linear(width, width), nn.Conv1d(width, width, 3), nn.ReLU())
    weights = dense_weights(layers, list(layers.parameters()))
    assert list(weights) == ([id(layers[0].weight)] if width == WIDTH else [])


@pytest.mark.whole
def test_ddp_of_compiled_module_keeps_full_graph() -> None:
    """Check that the wrapper adds no code that the compiler cannot trace: ``fullgraph`` raises."""

    def run(comm: Any) -> list[Any]:
        net = Net()
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        loss_of(DistributedDataParallel(compiled, comm), batch()).backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    net = Net()
    once(net, net)
    ((*gradients,),) = run_ranks(1, run)
    for gradient, parameter in zip(gradients, net.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-7)
