"""Compressed averages of gradients: what arrives, what is kept, what is sent."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import collective
from collective.adapters.torch import DistributedDataParallel
from collective.training.compression import Cast, PowerSGD, TopK
from collective.training.gradients import Gradients, Parameter
from tests.support.on_ranks import on_ranks, ranks_of

pytest.importorskip("array_api_compat")
pool = ranks_of(("threads", 2), ("shm", 2))
_SHAPES = [(40, 30), (7,), (16, 3, 5), (64, 64)]


def engine(comm: Any, like: str, reduce: Any, dtype: str = "float32") -> Gradients:
    parameters = [Parameter(f"p{i}", shape, dtype) for i, shape in enumerate(_SHAPES)]
    return Gradients(comm, parameters, like=like, bucket_bytes=4096, first_bytes=64, reduce=reduce)


def passed(gradients: Gradients, given: list[Any]) -> list[Any]:
    """Return what a pass makes of some gradients, as NumPy arrays."""
    for number, (view, each) in enumerate(zip(gradients.views, given)):
        view[...] = torch.from_numpy(each) if isinstance(view, torch.Tensor) else each
        gradients.ready(number)
    gradients.finish()
    return [np.array(np.asarray(view)) for view in gradients.views]


def drawn(comm: Any, step: int, rank: int | None = None) -> list[Any]:
    rank = comm.rank if rank is None else rank
    generator = np.random.default_rng((step, rank))
    return [generator.standard_normal(shape).astype(np.float32) for shape in _SHAPES]


def averages(comm: Any, step: int) -> list[Any]:
    every = [drawn(comm, step, rank) for rank in range(comm.size)]
    return [np.mean(each, axis=0) for each in zip(*every)]


# -- fewer bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("like", "dtype", "tolerance"),
    [("numpy", "float16", 1e-3), ("torch", "float16", 1e-3), ("torch", "bfloat16", 1e-2)],
)
@on_ranks("pool")
def test_cast(comm: Any, like: str, dtype: str, tolerance: float) -> None:
    gradients = engine(comm, like, Cast(comm, dtype))
    for step in range(2):
        got = passed(gradients, drawn(comm, step))
        for a, b in zip(got, averages(comm, step), strict=True):
            np.testing.assert_allclose(a, b, atol=4 * tolerance)
        assert any((a != b).any() for a, b in zip(got, averages(comm, step)))
    large = [np.full(shape, 4e4, np.float32) for shape in _SHAPES]  # float16 ends at 65504
    assert all(np.isfinite(each).all() for each in passed(gradients, large))


@on_ranks("pool")
def test_what_cannot_be_cast_to(comm: Any) -> None:
    with pytest.raises(collective.InvalidArgumentError, match="'float16' or 'bfloat16'"):
        Cast(comm, "int8")
    gradients = engine(comm, "numpy", Cast(comm, "bfloat16"))
    with pytest.raises(collective.UnsupportedError, match="has no bfloat16"):
        passed(gradients, drawn(comm, 0))
    for make in (lambda: TopK(comm, 0.0), lambda: TopK(comm, 1.1), lambda: PowerSGD(comm, 0)):
        with pytest.raises(collective.InvalidArgumentError):
            make()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_all_of_the_elements(comm: Any, like: str) -> None:
    gradients = engine(comm, like, TopK(comm, 1.0))
    for step in range(2):
        got = passed(gradients, drawn(comm, step))
        for a, b in zip(got, averages(comm, step), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("like", ["numpy", "torch"])
@pytest.mark.parametrize("kind", [TopK, PowerSGD])
@on_ranks("pool")
def test_what_is_left_out_comes_later(comm: Any, kind: Any, like: str) -> None:
    """What arrived in all passes, and the mean of what ranks keep, is the mean of what was given.

    The first pass may lay out the buckets anew, so nothing is kept in it: zeros.
    """
    reduce = kind(comm, 0.05) if kind is TopK else kind(comm, 1)
    gradients = engine(comm, like, reduce)
    passed(gradients, [np.zeros(shape, np.float32) for shape in _SHAPES])
    arrived = [np.zeros(shape) for shape in _SHAPES]
    given = [np.zeros(shape) for shape in _SHAPES]
    for step in range(4):
        got = passed(gradients, drawn(comm, step))
        arrived = [a + b for a, b in zip(arrived, got)]
        given = [a + b for a, b in zip(given, averages(comm, step))]
    short = [np.abs(a - b).max() for a, b in zip(arrived, given)]
    assert max(short) > 0.5  # a lot is missing yet
    for _ in range(400):
        got = passed(gradients, [np.zeros(shape, np.float32) for shape in _SHAPES])
        arrived = [a + b for a, b in zip(arrived, got)]
    for a, b in zip(arrived, given):
        np.testing.assert_allclose(a, b, atol=2e-2)


# -- low ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("like", ["numpy", "torch"])
@on_ranks("pool")
def test_matrices_of_a_low_rank_are_exact(comm: Any, like: str) -> None:
    left = np.random.default_rng(1).standard_normal((64, 2)).astype(np.float32)
    right = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float32)
    gradients = engine(comm, like, PowerSGD(comm, 2))
    given = drawn(comm, 0)
    given[3] = left @ right * (comm.rank + 1)
    got = passed(gradients, given)
    np.testing.assert_allclose(got[3], left @ right * 1.5, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[1], averages(comm, 0)[1], rtol=1e-6)  # a vector


# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "top-k", "powersgd"])
@on_ranks("pool")
def test_training(comm: Any, kind: str) -> None:
    made = {
        "float16": lambda: Cast(comm, "float16"),
        "bfloat16": lambda: Cast(comm),
        "top-k": lambda: TopK(comm, 0.1),
        "powersgd": lambda: PowerSGD(comm, 2),
    }[kind]()
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    ddp = DistributedDataParallel(model, comm, bucket_mib=0.001, reduce=made)
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
    every = comm.all_gather(model[0].weight.detach()[None])
    assert (every == every[0]).all()
