"""Batch normalisation over several ranks, compared with torch's own over the joined batches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from collective.adapters.torch import batch_norm  # noqa: E402
from collective.adapters.torch.batch_norm import (  # noqa: E402
    SyncBatchNorm,
    convert_sync_batchnorm,
)
from collective.errors import InvalidArgumentError, MismatchError, ShapeError  # noqa: E402
from collective.testing import RanksFailedError, run_ranks  # noqa: E402
from tests.support.derivatives import Spy  # noqa: E402
from tests.support.on_ranks import on_ranks, ranks_of  # noqa: E402

one = ranks_of(("threads", 1))
two = ranks_of(("threads", 2))

TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}


def batches(counts: list[int], rest: tuple[int, ...], dtype: Any, step: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    shape = (sum(counts), 3, *rest)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 5
    return list(x.to(dtype).split(counts))


def prepared(norm: Any) -> Any:
    with torch.no_grad():
        for index, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.arange(1.0, 4.0) - 2 * index)
    return norm


def steps(norm: Any, inputs: list[Any], weight: float = 1.0) -> list[Any]:
    """Train on the batches, then evaluate the first; return outputs and input gradients."""
    results = []
    for x in inputs:
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        # The loss is nonlinear, and normalisation does not make its gradient vanish.
        (y.double() ** 3 + y.double() * leaf.detach().double()).sum().mul(weight).backward()
        results.append((y.detach(), leaf.grad))
    norm.eval()
    x = inputs[0].clone().requires_grad_()
    y = norm(x)
    y.double().pow(2).sum().backward()
    results.append((y.detach(), x.grad))
    norm.train()
    return results


def one_rank(
    comm: Any, counts: list[int], rest: tuple[int, ...], dtype: Any, options: dict[str, Any]
) -> Any:
    norm = prepared(SyncBatchNorm(3, comm, **options))
    inputs = [batches(counts, rest, dtype, step)[comm.rank] for step in range(3)]
    outputs = steps(norm, inputs)
    return outputs, [p.grad for p in norm.parameters()], list(norm.buffers())


def compare(results: Any, counts: list[int], rest: Any, dtype: Any, options: Any) -> None:
    reference = prepared({0: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(rest)](3, **options))
    joined = [torch.cat(batches(counts, rest, dtype, step)) for step in range(3)]
    expected = steps(reference, joined)
    close = TOLERANCES[dtype]
    for step, (y, dx) in enumerate(expected):
        got = torch.cat([outputs[step][0] for outputs, _, _ in results])
        assert got.dtype == dtype
        torch.testing.assert_close(got, y, **close)
        got = torch.cat([outputs[step][1] for outputs, _, _ in results])
        torch.testing.assert_close(got, dx, rtol=close["rtol"] * 4, atol=close["atol"] * 50)
    for index, parameter in enumerate(reference.parameters()):
        total = sum(gradients[index] for _, gradients, _ in results)
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(
            total, parameter.grad, rtol=close["rtol"], atol=close["atol"] * scale
        )
    for _, _, buffers in results:
        for got, buffer in zip(buffers, reference.buffers()):
            torch.testing.assert_close(got, buffer, **TOLERANCES[torch.float32])


CASES: dict[str, tuple[list[int], tuple[int, ...], Any, dict[str, Any]]] = {
    "float64": ([4, 4], (2, 3), torch.float64, {"dtype": torch.float64}),
    "float32": ([4, 4], (2, 3), torch.float32, {}),
    "float32 input, no spatial axes": ([3, 2], (), torch.float32, {}),
    "bfloat16": ([16, 8], (2, 3), torch.bfloat16, {}),
    "float16": ([16, 8], (2, 3), torch.float16, {}),
    "uneven": ([1, 6, 3], (2, 3), torch.float64, {"dtype": torch.float64}),
    "empty batch on rank 1": ([4, 0, 3], (2, 3), torch.float64, {"dtype": torch.float64}),
    "empty batch on rank 0": ([0, 5], (), torch.float32, {}),
    "one value per rank": ([1, 1], (), torch.float64, {"dtype": torch.float64}),
    "single rank": ([5], (2, 3), torch.float64, {"dtype": torch.float64}),
    "cumulative": ([4, 2], (2, 3), torch.float32, {"momentum": None}),
    "momentum 0": ([4, 2], (2, 3), torch.float32, {"momentum": 0.0}),
    "not affine": ([4, 2], (2, 3), torch.float32, {"affine": False}),
    "no running statistics": ([4, 2], (2, 3), torch.float32, {"track_running_stats": False}),
    "large eps": ([4, 2], (2, 3), torch.float32, {"eps": 0.5, "momentum": 0.7}),
}


@pytest.mark.parametrize("name", CASES)
def test_sync_batch_norm_equals_joined_batch(name: str) -> None:
    compare(run_ranks(len(CASES[name][0]), one_rank, *CASES[name]), *CASES[name])


@on_ranks("two")
def test_sync_batch_norm_with_large_mean_keeps_precision(comm: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator, dtype=torch.float64) * 1e-2 + 1e3
    wide = x.float().double()
    expected = (wide - wide.mean(0)) / wide.std(0, correction=0)
    rows = slice(comm.rank * 32, comm.rank * 32 + 32)
    output = SyncBatchNorm(3, comm, eps=1e-12)(x[rows].float()).double()
    # E[x²] - E[x]² in float32 would have an error as large as the variance itself.
    torch.testing.assert_close(output, expected[rows], rtol=2e-2, atol=2e-2)


@on_ranks("two")
def test_sync_batch_norm_counts_many_values_exactly(comm: Any) -> None:
    """Check that counts beyond 2**24, which float32 cannot represent, are merged as float64."""
    x = torch.zeros(1, 1).expand(2**24 + 1 + comm.rank, 1)
    with torch.no_grad():
        assert batch_norm._joined(x, comm, False).count == 2**25 + 3


@on_ranks("two")
def test_sync_batch_norm_makes_one_call_per_training_pass(comm: Any) -> None:
    spy: Any = Spy(comm)
    norm = SyncBatchNorm(3, spy)
    x = torch.randn(4, 3, 2, requires_grad=True)
    y = norm(x)
    forward, spy.called = spy.called, []
    y.sum().backward()
    backward, spy.called = spy.called, []
    norm.eval()(x).sum().backward()
    with torch.no_grad():
        norm.eval()(x)
    assert (forward, backward, spy.called) == (["all_gather"], ["all_reduce"], [])


@on_ranks("two")
def test_sync_batch_norm_without_input_gradient_skips_backward_call(comm: Any) -> None:
    spy: Any = Spy(comm)
    norm = SyncBatchNorm(3, spy)
    norm(torch.arange(6.0).reshape(2, 3) + comm.rank).pow(2).sum().backward()
    assert norm.weight.grad.abs().sum() > 0
    assert spy.called == ["all_gather"]


@on_ranks("two")
def test_sync_batch_norm_without_gradients_updates_statistics(comm: Any) -> None:
    norm = SyncBatchNorm(3, comm)
    with torch.no_grad():
        y = norm(torch.full((2, 3), float(comm.rank)))
    assert not y.requires_grad
    torch.testing.assert_close(norm.running_mean, torch.full((3,), 0.05))
    mean = torch.full((3,), 2.0 * comm.rank - 1)
    torch.testing.assert_close(y.mean(0), mean, atol=1e-4, rtol=0)


@on_ranks("two", call_timeout=5)
def test_sync_batch_norm_backward_without_gradient_on_rank_completes(comm: Any) -> None:
    norm = SyncBatchNorm(3, comm, affine=False)
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(4, 3, generator=generator, requires_grad=comm.rank == 0)
    norm(x).pow(3).sum().backward()
    assert (x.grad is not None) == (comm.rank == 0)


@on_ranks("two")
def test_sync_batch_norm_of_empty_batches_keeps_statistics(comm: Any) -> None:
    norm = SyncBatchNorm(3, comm)
    x = torch.zeros(0, 3, 2, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3, 2)
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(norm.running_var, torch.ones(3))


@on_ranks("two")
def test_sync_batch_norm_second_derivative_raises(comm: Any) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    y = SyncBatchNorm(3, comm)(x).pow(2).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# -- errors ---------------------------------------------------------------------------------


@on_ranks("two", call_timeout=5)
def test_sync_batch_norm_bad_input_raises_before_communication(comm: Any) -> None:
    norm = SyncBatchNorm(3, comm)
    for bad in (torch.zeros(2, 4), torch.zeros(3)):
        with pytest.raises(ShapeError, match=r"\(N, 3, \.\.\.\)"):
            norm(bad)
    with pytest.raises(InvalidArgumentError, match="floating"):
        norm(torch.zeros(2, 3, dtype=torch.int64))
    assert norm(torch.ones(2, 3)).shape == (2, 3)


@on_ranks("two", call_timeout=5)
def test_sync_batch_norm_of_different_channels_raises_on_all_ranks(comm: Any) -> None:
    channels = 3 + comm.rank
    with pytest.raises(MismatchError):
        SyncBatchNorm(channels, comm)(torch.ones(2, channels))


def test_sync_batch_norm_bad_input_on_one_rank_ends_other_ranks() -> None:
    def program(comm: Any) -> None:
        SyncBatchNorm(3, comm)(torch.ones(2, 3 + comm.rank))

    with pytest.raises(RanksFailedError, match="ShapeError"):
        run_ranks(2, program, call_timeout=5)


@on_ranks("two", call_timeout=5)
def test_sync_batch_norm_of_single_value_raises_on_all_ranks(comm: Any) -> None:
    with pytest.raises(ValueError, match="one value per channel"):
        SyncBatchNorm(3, comm)(torch.ones(int(comm.rank == 0), 3))


# -- conversion -----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, momentum=None))
        self.rest = nn.ModuleDict({"a": nn.ModuleList([nn.BatchNorm1d(4, affine=False)])})
        self.volume = nn.BatchNorm3d(2, track_running_stats=False).half()
        self.shared = self.first[1]
        self.frozen = nn.BatchNorm2d(3).eval().requires_grad_(False)


@on_ranks("one")
def test_convert_sync_batchnorm_changes_only_class(comm: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    prepared(net.first[1])
    before = dict(net.state_dict(keep_vars=True))
    called = []
    net.frozen.register_forward_hook(lambda *args: called.append(args))
    converted = convert_sync_batchnorm(net, comm)
    assert converted is net
    after = net.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert [type(m) for m in norms] == [SyncBatchNorm] * 4
    assert net.shared is net.first[1]
    assert net.first[1].momentum is None
    assert net.volume.weight.dtype is torch.float16
    assert net.volume.running_mean is None
    assert net.first[1].training
    assert not net.frozen.training
    assert not net.frozen.weight.requires_grad
    net.frozen(torch.ones(2, 3, 1, 1))
    assert len(called) == 1
    nn.BatchNorm2d(3).load_state_dict(net.frozen.state_dict())
    assert "4, eps=1e-05, momentum=0.1, affine=False" in repr(net)


def test_convert_sync_batchnorm_net_equals_plain_net_on_joined_batch() -> None:
    x = torch.randn(6, 1, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def net() -> Any:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
        return nn.Sequential(layers, nn.Linear(27, 2), nn.BatchNorm1d(2)).double()

    reference = net()
    reference(x).pow(3).sum().backward()

    plain = [net(), net()]

    def program(comm: Any) -> Any:
        model = convert_sync_batchnorm(plain[comm.rank], comm)
        model(x[:2] if comm.rank == 0 else x[2:]).pow(3).sum().backward()
        return [comm.all_reduce(p.grad) for p in model.parameters()]

    for gradients in run_ranks(2, program):
        for got, parameter in zip(gradients, reference.parameters()):
            torch.testing.assert_close(got, parameter.grad)


@on_ranks("one")
def test_convert_sync_batchnorm_replaces_single_norm(comm: Any) -> None:
    norm = nn.BatchNorm1d(3)
    converted = convert_sync_batchnorm(norm, comm)
    assert type(converted) is SyncBatchNorm
    assert type(norm) is nn.BatchNorm1d
    assert type(convert_sync_batchnorm(converted, comm)) is SyncBatchNorm
    assert type(convert_sync_batchnorm(nn.Linear(2, 2), comm)) is nn.Linear
    assert convert_sync_batchnorm(nn.SyncBatchNorm(3), comm).comm is comm


@on_ranks("one")
def test_convert_sync_batchnorm_of_lazy_or_custom_norm_raises(comm: Any) -> None:
    class Own(nn.BatchNorm2d):
        def forward(self, x: Any) -> Any:
            return x

    net = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d(), Own(3))
    with pytest.raises(InvalidArgumentError, match=r"1 \(Lazy.*lazy.*2 \(Own\).*by hand"):
        convert_sync_batchnorm(net, comm)
    assert type(net[0]) is nn.BatchNorm2d
    lazy = nn.Sequential(nn.LazyBatchNorm2d())
    lazy(torch.ones(2, 3, 2, 2))
    assert type(convert_sync_batchnorm(lazy, comm)[0]) is SyncBatchNorm


@on_ranks("one")
def test_sync_batch_norm_copy_shares_comm_and_pickle_raises(comm: Any) -> None:
    norm = SyncBatchNorm(3, comm)
    twin = copy.deepcopy(norm)
    assert twin.comm is comm
    assert twin.weight is not norm.weight
    with pytest.raises(InvalidArgumentError, match="state_dict"):
        pickle.dumps(norm)
