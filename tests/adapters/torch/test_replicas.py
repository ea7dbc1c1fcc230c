"""DataParallel: one process and several devices, each with a replica and a thread."""

from __future__ import annotations

import copy
import dataclasses
import threading
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from collective.adapters.torch import scattering  # noqa: E402
from collective.adapters.torch.replicas import (  # noqa: E402
    DataParallel,
    data_parallel,
)
from collective.errors import (  # noqa: E402
    DeviceError,
    InvalidArgumentError,
    ShapeError,
)

CPUS = ["cpu", "cpu"]
# Rounding by another order of summation stays within these bounds; a lost gradient is far outside.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 6, 2, padding=1),
        nn.BatchNorm2d(6).eval(),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        out, _ = self.cells(x.unflatten(1, (2, 4)))
        return self.head(out[:, -1])


@pytest.mark.parametrize("build", [mlp, cnn, Recurrent])
@pytest.mark.parametrize("devices", [2, 3])
def test_data_parallel_training_equals_single_module(build, devices):
    torch.manual_seed(0)
    alone = build()
    wrapped = DataParallel(copy.deepcopy(alone), ["cpu"] * devices)
    data = [(torch.randn(n, 8), torch.randint(3, (n,))) for n in (10, 7, 12, 1, 10)]
    ends = []
    for model in (alone, wrapped):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for x, y in data * 2:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ends.append(losses)
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)
    assert ends[0][0] != ends[0][-1]
    for expected, parameter in zip(alone.parameters(), wrapped.parameters()):
        assert torch.allclose(expected, parameter, **CLOSE)


class Echo(nn.Module):
    """A module that returns its arguments and records the thread and replica of each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.calls: list[Any] = []

    def forward(self, *args, **kwargs):
        self.calls.append((threading.current_thread().name, self))
        return args, kwargs


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    more: dict


def test_data_parallel_scatters_and_gathers_nested_arguments():
    module = Echo()
    batch = Batch(torch.randn(4, 2), {"mask": [torch.arange(4)], "name": "a"})
    args, kwargs = DataParallel(module, CPUS)(batch, 3, None, scale=torch.arange(4.0), flag=True)
    assert torch.equal(args[0].image, batch.image)
    assert args[0].more["mask"][0].tolist() == [0, 1, 2, 3]
    assert (args[0].more["name"], args[1:], kwargs["flag"]) == ("a", (3, None), True)
    assert kwargs["scale"].tolist() == [0, 1, 2, 3]
    assert sorted(name for name, _ in module.calls) == ["replica-0", "replica-1"]
    assert module not in [part for _, part in module.calls]


@pytest.mark.parametrize(("samples", "replicas"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3)])
def test_data_parallel_with_few_samples_uses_fewer_replicas(samples, replicas):
    module = Echo()
    (x,), _ = DataParallel(module, ["cpu"] * 3)(torch.arange(samples), flag=True)
    assert x.tolist() == list(range(samples))
    assert len(module.calls) == replicas
    # A single replica is the module itself.
    assert (module in [part for _, part in module.calls]) is (replicas == 1)


def test_data_parallel_on_one_device_calls_module_directly():
    module = Echo()
    x = torch.ones(3)
    args, kwargs = DataParallel(module, ["cpu"])(x, loss=torch.tensor(1.0)[None])
    assert args[0] is x
    assert list(kwargs) == ["loss"]
    assert module.calls == [(threading.current_thread().name, module)]


def test_data_parallel_without_tensors_calls_module_directly():
    module = Echo()
    assert DataParallel(module, CPUS)() == ((), {})
    assert DataParallel(module, CPUS)(2, n=3) == ((2,), {"n": 3})
    assert len(module.calls) == 2


def test_data_parallel_splits_along_dim():
    x = torch.randn(2, 4, 3)
    module = Echo()
    (gathered,), _ = DataParallel(module, CPUS, dim=1)(x)
    assert torch.equal(gathered, x)
    assert len(module.calls) == 2


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        return self.linear(x).square().mean()


@pytest.mark.filterwarnings("ignore:gather. every replica")
def test_data_parallel_gathers_scalar_losses_as_vector():
    module = Loss()
    x = torch.randn(6, 8)
    wrapped = DataParallel(module, CPUS)
    losses = wrapped(x)
    assert losses.shape == (2,)
    assert wrapped(x[:1]).shape == (1,)
    assert DataParallel(module, ["cpu"])(x).shape == ()
    losses.mean().backward()
    gradient = module.linear.weight.grad.clone()
    module.zero_grad()
    module(x).backward()
    assert torch.allclose(gradient, module.linear.weight.grad, **CLOSE)


def test_data_parallel_keeps_running_statistics_of_first_part():
    torch.manual_seed(0)
    module = nn.BatchNorm1d(3)
    expected = copy.deepcopy(module)
    x = torch.randn(8, 3)
    out = DataParallel(module, CPUS)(x)
    first = expected(x[:4])
    for name, buffer in expected.named_buffers():
        assert torch.allclose(buffer, module.get_buffer(name), **CLOSE)
    assert torch.allclose(out[:4], first)
    assert not torch.allclose(out[4:], expected.eval()(x[4:]), atol=1e-2)


def test_data_parallel_second_derivatives_equal_module():
    module = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 8)
    gradients = []
    for model in (module, DataParallel(module, CPUS)):
        module.zero_grad()
        first = torch.autograd.grad(model(x).sum(), list(module.parameters()), create_graph=True)
        sum(grad.square().sum() for grad in first).backward()
        gradients.append([parameter.grad.clone() for parameter in list(module.parameters())[:-1]])
    assert all(torch.allclose(a, b, **CLOSE) for a, b in zip(*gradients))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_data_parallel_without_gradients_records_no_graph(mode):
    module = mlp()
    x = torch.randn(4, 8)
    with mode():
        out = DataParallel(module, CPUS)(x)
        assert torch.allclose(out, module(x), **CLOSE)
    assert out.grad_fn is None
    assert out.is_inference() is (mode is torch.inference_mode)


def test_data_parallel_under_autocast_has_float32_gradients():
    module = mlp()
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = DataParallel(module, CPUS)(x)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}


def test_data_parallel_runs_hooks_of_modules_and_parameters():
    module = mlp()
    seen = []
    module[0].register_forward_pre_hook(lambda part, args: seen.append("pre"))
    module[2].register_full_backward_hook(lambda part, *_: seen.append("backward"))
    module[0].weight.register_hook(lambda grad: seen.append("parameter"))
    module[4].bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    DataParallel(module, CPUS)(torch.ones(4, 8)).sum().backward()
    counts = {name: seen.count(name) for name in seen}
    assert counts == {"pre": 2, "backward": 2, "parameter": 1, "accumulated": 1}


def test_data_parallel_state_dict_has_module_prefix():
    module = cnn()
    wrapped = DataParallel(module, CPUS)
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    other = DataParallel(cnn(), ["cpu"] * 3)
    other.load_state_dict(wrapped.state_dict())
    assert all(map(torch.equal, other.parameters(), module.parameters()))
    again = copy.deepcopy(wrapped)
    x = torch.randn(4, 8)
    assert torch.allclose(again(x), wrapped(x), **CLOSE)
    assert "devices=[cpu, cpu], output_device=cpu, dim=0" in repr(wrapped)


def test_data_parallel_subclass_may_override_scatter_and_gather():
    class Mine(DataParallel):
        def scatter(self, inputs, kwargs, devices):
            return scattering.scatter_kwargs(inputs, kwargs, devices, self.dim, [1, 3])

        def gather(self, outputs, output_device):
            return [len(args[0]) for args, _ in outputs]

    assert Mine(Echo(), CPUS)(torch.ones(4)) == [1, 3]


def test_data_parallel_function_equals_wrapper_call():
    module = Echo()
    (x,), kwargs = data_parallel(module, torch.arange(3), CPUS, module_kwargs={"n": 1})
    assert (x.tolist(), kwargs, len(module.calls)) == ([0, 1, 2], {"n": 1}, 2)
    args, _ = data_parallel(module, (torch.ones(2, 4), 5), CPUS, dim=1)
    assert (args[0].shape, args[1]) == ((2, 4), 5)
    assert data_parallel(module, (torch.ones(2),), CPUS, "meta")[0][0].is_meta


def test_data_parallel_default_devices_are_gpus_or_module_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert DataParallel(nn.Linear(1, 1)).devices == [torch.device("cpu")]
    assert DataParallel(nn.Linear(1, 1, device="meta")).devices == [torch.device("meta")]
    assert DataParallel(nn.ReLU()).devices == [torch.device("cpu")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    same = types.SimpleNamespace(total_memory=1, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: same)
    wrapped = DataParallel(nn.Linear(1, 1))
    assert wrapped.devices == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert wrapped.output_device == torch.device("cuda:0")


def test_data_parallel_misuse_raises():
    with pytest.raises(InvalidArgumentError, match="is a function"):
        DataParallel(test_data_parallel_misuse_raises, CPUS)
    with pytest.raises(DeviceError, match="a list"):
        DataParallel(nn.ReLU(), [])
    with pytest.raises(InvalidArgumentError, match="not initialized"):
        DataParallel(nn.LazyLinear(1), CPUS)
    with pytest.raises(DeviceError, match=r"on meta \(expected cpu.*module\.to\('cpu'\)"):
        DataParallel(nn.Linear(1, 1, device="meta"), CPUS)(torch.ones(2, 1))
    with pytest.raises(ShapeError, match="pieces"):
        DataParallel(Echo(), CPUS)(torch.ones(4), torch.ones(1))
