"""Virtual shards in ``DistributedDataParallel``: equal bits on any number of ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from collective.adapters.torch import (
    DistributedDataParallel,
    ShardedOptimizer,
    Split,
    SyncBatchNorm,
)
from collective.errors import GradientError, UnsupportedError
from collective.testing import RankPool
from tests.support.on_ranks import ranks_of
from tests.support.torch_groups import run_in_group

SHARDS = 4
pool = ranks_of(("threads", 1), ("threads", 3), ("threads", 5), ("shm", 2))
one, two = ranks_of(("threads", 1)), ranks_of(("threads", 2))


def network(kind: str = "perceptron") -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
    if kind == "transformer":
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        model = nn.Sequential(nn.Linear(6, 40), nn.Unflatten(1, (5, 8)), encoder, nn.Flatten(),
                              nn.Linear(40, 2))  # fmt: skip
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    return model


def samples(step: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + shard)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def loss_of(model: Any, step: int, shard: int) -> torch.Tensor:
    x, y = samples(step, shard)
    return ((model(x) - y) ** 2).mean()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread: PyTorch's kernels round differently with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def alone(steps: int, kind: str = "perceptron") -> list[torch.Tensor]:
    """Return weights and buffers of a training by one process, without this library."""
    model = network(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        gradients, states = [], []
        before = [buffer.clone() for buffer in model.buffers()]
        for shard in range(SHARDS):
            for buffer, value in zip(model.buffers(), before):
                buffer.copy_(value)
            loss = loss_of(model, step, shard)
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            states.append([buffer.clone() for buffer in model.buffers()])
        for parameter, (a, b, c, d) in zip(model.parameters(), zip(*gradients)):
            parameter.grad = ((a + b) + (c + d)) / SHARDS
        for buffer, (a, b, c, d) in zip(model.buffers(), zip(*states)):
            buffer.copy_(((a + b) + (c + d)) / SHARDS if buffer.is_floating_point() else d)
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


@one_thread()
def trained(comm: Any, steps: int, bucket_mib: float, kind: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(kind), comm, shards=SHARDS, bucket_mib=bucket_mib)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        for shard in model.each_shard():
            loss_of(model, step, shard).backward()
        optimizer.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize(
    ("bucket_mib", "kind"),
    [(25.0, "perceptron"), (0.0002, "perceptron"), (0.002, "transformer")],
)
def test_training_has_the_bits_of_one_process(pool: RankPool, bucket_mib: float, kind: str) -> None:
    wanted = alone(4, kind)
    names = list(network(kind).state_dict())
    for rank, found in enumerate(pool.run(trained, 4, bucket_mib, kind)):
        for name, value, expected in zip(names, found, wanted, strict=True):
            assert torch.equal(value, expected), f"{name} of rank {rank}"


@one_thread()
def trained_with_divided_state(comm: Any, steps: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), comm, shards=SHARDS)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, comm, lr=0.1, momentum=0.9)
    for step in range(steps):
        for shard in model.each_shard():
            loss_of(model, step, shard).backward()
        optimizer.step()
    return list(model.state_dict().values())


def test_sharded_optimizer_keeps_the_bits(pool: RankPool) -> None:
    for values in pool.run(trained_with_divided_state, 3):
        assert all(torch.equal(*pair) for pair in zip(values, alone(3), strict=True))


def _reduced_meanwhile(comm: Any) -> list[bool]:
    """Return for each shard whether a bucket was reduced before its backward pass ended."""
    model = DistributedDataParallel(network(), comm, shards=SHARDS, bucket_mib=0.0002)
    reduced, seen = threading.Event(), []
    model.comm.hook(after=lambda event, error: reduced.set())

    def wait(grad: torch.Tensor) -> None:
        seen.append(reduced.wait(30.0 if shard == model.shards.mine[-1] else 0.0))

    # The gradients of the last layers are there before that of the first layer's output.
    model.module[0].register_forward_hook(lambda *call: call[2].register_hook(wait) and None)
    for shard in model.each_shard():
        reduced.clear()
        loss_of(model, 0, shard).backward()
    return seen


def test_buckets_are_reduced_during_the_pass_of_the_last_shard(two: RankPool) -> None:
    assert two.run(_reduced_meanwhile) == [[False, True]] * 2


# -- errors ---------------------------------------------------------------------------------------


def _outside(comm: Any) -> None:
    DistributedDataParallel(network(), comm, shards=SHARDS)(samples(0, 0)[0])


def test_forward_pass_outside_of_each_shard_is_refused(one: RankPool) -> None:
    with pytest.raises(Exception, match=r"a pass with gradients outside of each_shard\(\)"):
        one.run(_outside)


def _without_sync(comm: Any) -> None:
    model = DistributedDataParallel(network(), comm, shards=SHARDS)
    for shard in model.each_shard():
        with model.no_sync():
            loss_of(model, 0, shard)


def test_pass_in_no_sync_is_refused(one: RankPool) -> None:
    with pytest.raises(Exception, match=r"outside of each_shard\(\), or in no_sync\(\) \[rank 0"):
        one.run(_without_sync)


def _pipeline(rank: int, size: int, microbatches: int, in_loop: bool) -> str:
    """Train a pipeline whose stage has shards, among the replicas of the stage."""
    from torch.distributed import pipelining

    comm: Any = torch.distributed.group.WORLD.comm  # type: ignore[union-attr]
    model = DistributedDataParallel(network(), comm, shards=SHARDS)
    stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, microbatches, nn.functional.mse_loss)
    x, y = samples(0, 0)
    try:
        for _ in model.each_shard() if in_loop else [0]:
            schedule.step(x, target=y)
    except (GradientError, RuntimeError) as error:  # PyTorch wraps the error of a backward pass
        return str(error.__cause__ or error)
    return "no error"


@pytest.mark.parametrize(
    ("microbatches", "in_loop", "text"),
    [
        (2, False, "a pass with gradients outside of each_shard()"),
        (2, True, "a second backward pass for one shard"),
        (1, True, "no error"),
    ],
)
def test_pipeline_with_shards_is_refused_unless_it_makes_one_pass(
    microbatches: int, in_loop: bool, text: str
) -> None:
    assert text in run_in_group(("threads", 1), _pipeline, microbatches, in_loop)[0]


def _body(comm: Any, passes: int) -> str:
    model = DistributedDataParallel(network(), comm, shards=SHARDS)
    try:
        for shard in model.each_shard():
            for _ in range(passes):
                loss_of(model, 0, shard).backward()
    except GradientError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("passes", "text"), [(0, "shard 0 made no backward pass"), (2, "a second backward pass")]
)
def test_body_with_another_number_of_passes_is_refused(
    one: RankPool, passes: int, text: str
) -> None:
    assert text in one.run(_body, passes)[0]


def _again(comm: Any) -> list[torch.Tensor]:
    """Train after a loop that was left in the middle."""
    model = DistributedDataParallel(network(), comm, shards=SHARDS)
    for shard in model.each_shard():
        loss_of(model, 0, shard).backward()
        break
    for shard in model.each_shard():
        loss_of(model, 0, shard).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_loop_after_an_abandoned_one_begins_anew(one: RankPool) -> None:
    model = network()
    passes = [
        torch.autograd.grad(loss_of(model, 0, shard), list(model.parameters()))
        for shard in range(SHARDS)
    ]
    names = [name for name, _ in model.named_parameters()]
    for name, found, (a, b, c, d) in zip(names, one.run(_again)[0], zip(*passes), strict=True):
        assert torch.equal(found, ((a + b) + (c + d)) / SHARDS), name


def _refused(comm: Any, case: str) -> str:
    modules: dict[str, Any] = {
        "SyncBatchNorm": nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2, comm=comm)),
        "sparse gradients": nn.Embedding(4, 2, sparse=True),
        "Split": nn.Sequential(Split(nn.Conv2d(1, 1, 3), comm=comm)),
    }
    options = {
        "find_unused_parameters": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
        "reduce": {"reduce": lambda bucket: None},
    }
    module, extra = modules.get(case, network()), options.get(case, {})
    try:
        DistributedDataParallel(module, comm, shards=2, **extra)
    except UnsupportedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "case",
    [
        "find_unused_parameters",
        "static_graph",
        "reduce",
        "SyncBatchNorm",
        "sparse gradients",
        "Split",
    ],
)
def test_options_that_exclude_shards_are_refused_by_name(one: RankPool, case: str) -> None:
    text = one.run(_refused, case)[0]
    assert case in text
    assert "with shards" in text


def _without(comm: Any) -> None:
    DistributedDataParallel(network(), comm).each_shard()


def test_each_shard_of_a_wrapper_without_shards_is_refused(one: RankPool) -> None:
    with pytest.raises(Exception, match="this wrapper has no shards"):
        one.run(_without)
