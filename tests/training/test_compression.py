"""Compressed averages of gradients: results, and residuals that are sent later."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import collective  # noqa: E402
from collective.adapters.torch import DistributedDataParallel  # noqa: E402
from collective.training.compression import Cast, PowerSGD, TopK  # noqa: E402
from collective.training.gradients import Gradients, Parameter  # noqa: E402
from tests.support.on_ranks import on_ranks, ranks_of  # noqa: E402

pytest.importorskip("array_api_compat")
pool = ranks_of(("threads", 2), ("shm", 2))
_SHAPES = [(40, 30), (7,), (16, 3, 5), (64, 64)]


def engine(comm: Any, like: str, reduce: Any, dtype: str = "float32") -> Gradients:
    parameters = [Parameter(f"p{i}", shape, dtype) for i, shape in enumerate(_SHAPES)]
    return Gradients(comm, parameters, like=like, bucket_bytes=4096, first_bytes=64, reduce=reduce)


def passed(gradients: Gradients, inputs: list[Any], backwards: bool = False) -> list[Any]:
    """Run a pass over some gradients; return the reduced gradients as NumPy arrays."""
    order = list(enumerate(zip(gradients.views, inputs)))
    for number, (view, values) in reversed(order) if backwards else order:
        view[...] = torch.from_numpy(values) if isinstance(view, torch.Tensor) else values
        gradients.ready(number)
    gradients.finish()
    return [np.array(np.asarray(view)) for view in gradients.views]


def drawn(comm: Any, step: int, rank: int | None = None) -> list[Any]:
    rank = comm.rank if rank is None else rank
    generator = np.random.default_rng((step, rank))
    return [generator.standard_normal(shape).astype(np.float32) for shape in _SHAPES]


def averages(comm: Any, step: int) -> list[Any]:
    every = [drawn(comm, step, rank) for rank in range(comm.size)]
    return [np.mean(gradients, axis=0) for gradients in zip(*every)]


# -- fewer bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("like", "dtype", "tolerance"),
    [("numpy", "float16", 1e-3), ("torch", "float16", 1e-3), ("torch", "bfloat16", 1e-2)],
)
@on_ranks("pool")
def test_cast_average_is_close_to_exact_average(
    comm: Any, like: str, dtype: str, tolerance: float
) -> None:
    gradients = engine(comm, like, Cast(comm, dtype))
    for step in range(2):
        reduced = passed(gradients, drawn(comm, step))
        for a, b in zip(reduced, averages(comm, step), strict=True):
            np.testing.assert_allclose(a, b, atol=4 * tolerance)
        assert any((a != b).any() for a, b in zip(reduced, averages(comm, step)))
    large = [np.full(shape, 4e4, np.float32) for shape in _SHAPES]  # float16 ends at 65504
    assert all(np.isfinite(result).all() for result in passed(gradients, large))


@on_ranks("pool")
def test_compression_with_bad_options_raises(comm: Any) -> None:
    with pytest.raises(collective.InvalidArgumentError, match="'float16' or 'bfloat16'"):
        Cast(comm, "int8")
    gradients = engine(comm, "numpy", Cast(comm, "bfloat16"))
    with pytest.raises(collective.UnsupportedError, match="has no bfloat16"):
        passed(gradients, drawn(comm, 0))
    for make in (lambda: TopK(comm, 0.0), lambda: TopK(comm, 1.1), lambda: PowerSGD(comm, 0)):
        with pytest.raises(collective.InvalidArgumentError):
            make()


def test_cast_without_array_api_compat_recommends_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def fails(name: str, *args: Any, **options: Any) -> Any:
        if name == "array_api_compat":
            raise ImportError(name)
        return real(name, *args, **options)

    with collective.init("threads") as comm:
        gradients = engine(comm, "numpy", Cast(comm, "float16"))
        monkeypatch.setattr(builtins, "__import__", fails)
        with pytest.raises(collective.UnsupportedError, match="pip install array-api-compat"):
            passed(gradients, drawn(comm, 0))


# -- the largest elements -------------------------------------------------------------------------


@pytest.mark.parametrize("like", ["numpy", "torch"])
@on_ranks("pool")
def test_top_k_of_all_elements_is_exact(comm: Any, like: str) -> None:
    gradients = engine(comm, like, TopK(comm, 1.0))
    for step in range(2):
        reduced = passed(gradients, drawn(comm, step))
        for a, b in zip(reduced, averages(comm, step), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("like", ["numpy", "torch"])
@pytest.mark.parametrize("kind", [TopK, PowerSGD])
@on_ranks("pool")
def test_compression_sends_residual_in_later_passes(comm: Any, kind: Any, like: str) -> None:
    """Check that all passes' results and the mean residual add up to the mean of all gradients.

    Later passes send the residuals of earlier passes. The first pass changes the layout of the
    buckets.
    """
    reduce = kind(comm, 0.05) if kind is TopK else kind(comm, 1)
    gradients = engine(comm, like, reduce)
    received = [np.zeros(shape) for shape in _SHAPES]
    expected = [np.zeros(shape) for shape in _SHAPES]
    for step in range(4):
        reduced = passed(gradients, drawn(comm, step), backwards=True)
        received = [a + b for a, b in zip(received, reduced)]
        expected = [a + b for a, b in zip(expected, averages(comm, step))]
    missing = [np.abs(a - b).max() for a, b in zip(received, expected)]
    assert max(missing) > 0.5  # the first passes have left a lot out
    for _ in range(400):
        reduced = passed(gradients, [np.zeros(shape, np.float32) for shape in _SHAPES])
        received = [a + b for a, b in zip(received, reduced)]
    for a, b in zip(received, expected):
        np.testing.assert_allclose(a, b, atol=2e-2)


# -- low ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("like", ["numpy", "torch"])
@on_ranks("pool")
def test_powersgd_reads_and_writes_gradients_in_any_order_of_axes(comm: Any, like: str) -> None:
    shapes = [(30, 40), (5, 16, 3)]  # the second one is sent whole
    parameters = [
        Parameter("matrix", shapes[0], "float32", (1, 0)),
        Parameter("whole", shapes[1], "float32", (2, 0, 1)),
    ]
    gradients = Gradients(comm, parameters, like=like, reduce=PowerSGD(comm, 2))
    rows, columns = (np.random.default_rng(n).standard_normal(shapes[0][n]) for n in range(2))
    inputs = [np.outer(rows, columns), np.arange(240.0).reshape(shapes[1])]
    scaled = [(array * (comm.rank + 1)).astype(np.float32) for array in inputs]
    for array, reduced in zip(inputs, passed(gradients, scaled), strict=True):
        np.testing.assert_allclose(reduced, array * (comm.size + 1) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("like", ["numpy", "torch"])
@on_ranks("pool")
def test_powersgd_of_low_rank_matrix_is_exact(comm: Any, like: str) -> None:
    left = np.random.default_rng(1).standard_normal((64, 2)).astype(np.float32)
    right = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float32)
    gradients = engine(comm, like, PowerSGD(comm, 2))
    values = drawn(comm, 0)
    values[3] = left @ right * (comm.rank + 1)
    reduced = passed(gradients, values)
    np.testing.assert_allclose(reduced[3], left @ right * 1.5, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(reduced[1], averages(comm, 0)[1], rtol=1e-6)  # a vector


# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "top-k", "powersgd"])
@on_ranks("pool")
def test_training_with_compression_converges(comm: Any, kind: str) -> None:
    reduction = {
        "float16": lambda: Cast(comm, "float16"),
        "bfloat16": lambda: Cast(comm),
        "top-k": lambda: TopK(comm, 0.1),
        "powersgd": lambda: PowerSGD(comm, 2),
    }[kind]()
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    ddp = DistributedDataParallel(model, comm, bucket_mib=0.001, reduce=reduction)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    x = torch.randn(16 * comm.size, 12, generator=generator)
    y = torch.tanh(x[:, :3])
    x, y = x.chunk(comm.size)[comm.rank], y.chunk(comm.size)[comm.rank]
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = (ddp(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses[::30]
    weights = comm.all_gather(model[0].weight.detach()[None])
    assert (weights == weights[0]).all()
