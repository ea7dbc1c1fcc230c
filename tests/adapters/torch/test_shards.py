"""Virtual shards in ``DistributedDataParallel``: equal bits on any number of ranks."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collective.adapters.torch import (
    DistributedDataParallel,
    ShardedOptimizer,
    Split,
    SyncBatchNorm,
)
from collective.errors import GradientError, PeerFailedError, UnsupportedError
from collective.testing import RankPool, run_ranks
from tests.support.on_ranks import ranks_of
from tests.support.torch_groups import run_in_group

SHARDS = 4
pool = ranks_of(("threads", 1), ("threads", 3), ("threads", 5), ("shm", 2))
one, two = ranks_of(("threads", 1)), ranks_of(("threads", 2))
processes = ranks_of(("shm", 2), ("shm", 3))


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


# -- state beside the gradients -------------------------------------------------------------------


class Stateful(nn.Module):
    """Layer whose passes change state of every kind that the loop follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min))
        self.count, self.rate, self.loss = 0, 0.5, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.count += 1
        self.rate = 0.9 * self.rate + 0.1 * x[0, 0].item()
        noise = torch.rand(1).item() + random.random() + np.random.rand()
        y = self.layer(x - self.mean) * (self.rate + noise / self.count)
        if self.loss is not None:
            y = y + self.loss.detach()
        self.loss = y.mean()
        return y + self.loss


@one_thread()
def _with_state(comm: Any) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = Stateful()
    model = DistributedDataParallel(net, comm, shards=SHARDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for shard in model.each_shard():
            loss_of(model, step, shard).backward()
        optimizer.step()
    return [*model.state_dict().values(), torch.tensor([net.count, net.rate], dtype=torch.double)]


def test_state_of_every_kind_does_not_depend_on_the_ranks(processes: RankPool) -> None:
    with RankPool(1) as alone:
        (expected,) = alone.run(_with_state)
    assert expected[-1][0] == 3
    assert expected[1].tolist() == [torch.finfo(torch.float32).min] * 2
    for found in processes.run(_with_state):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


class Carrying(nn.Module):
    """Layer whose passes write state that cannot be followed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(6, 2)
        self.mean, self.values = torch.zeros(6), np.zeros(2)
        self.register_buffer("cache", torch.zeros(1))
        self.generator, self.random = torch.Generator(), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.kind == "parameter layer.weight was written":
                self.layer.weight.mul_(0.9)
            elif self.kind == "buffer cache was removed, or took another shape or dtype":
                self.cache = torch.zeros(2)
            elif self.kind == "a buffer was registered":
                self.register_buffer("other", torch.zeros(2))
            elif self.kind == "the attribute mean was written":
                self.mean = 0.9 * self.mean + x.mean(0)
            elif self.kind == "the attribute values was written":
                self.values += 1
            elif self.kind == "the attribute last was written":
                self.last = x.shape[0]
            elif self.kind == "the attribute generator was written":
                x = x + torch.rand(1, generator=self.generator)
            elif self.kind == "the attribute random was written":
                x = x + self.random.random()
            elif "in a loop" in self.kind:
                self.layer.weight = nn.Parameter(self.layer.weight.clone())
        return self.layer(x)


def _carried(comm: Any, kind: str) -> str:
    model = DistributedDataParallel(Carrying(kind), comm, shards=SHARDS)
    try:
        for shard in model.each_shard():
            loss_of(model, 0, shard).backward()
    except (UnsupportedError, PeerFailedError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "kind",
    [
        "parameter layer.weight was written",
        "buffer cache was removed, or took another shape or dtype",
        "a buffer was registered",
        "the attribute mean was written",
        "the attribute values was written",
        "the attribute last was written",
        "the attribute generator was written",
        "the attribute random was written",
        "layer.weight was replaced in a loop of each_shard()",
    ],
)
def test_state_that_cannot_be_followed_is_refused_at_all_ranks(kind: str) -> None:
    # The ranks without shards make no pass, so they learn of it from the others.
    for text in run_ranks(SHARDS + 1, _carried, kind):
        assert f"DistributedDataParallel: {kind}" in text


def _accumulated(comm: Any, between: str) -> list[torch.Tensor]:
    model = DistributedDataParallel(network(), comm, shards=SHARDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        for shard in model.each_shard():
            loss_of(model, step, shard).backward()
        if between == "step" and step == 0:
            optimizer.step()
        elif between == "zero_grad" and step == 0:
            optimizer.zero_grad(set_to_none=False)
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("between", ["nothing", "step", "zero_grad"])
def test_gradients_of_loops_add_up_until_a_step(pool: RankPool, between: str) -> None:
    model = network()
    loops = []
    for step in range(3):
        passes = [
            torch.autograd.grad(loss_of(model, step, shard), list(model.parameters()))
            for shard in range(SHARDS)
        ]
        loops.append([((a + b) + (c + d)) / SHARDS for a, b, c, d in zip(*passes)])
    if between != "nothing":
        del loops[0]
    for found in pool.run(_accumulated, between):
        for grad, parts in zip(found, zip(*loops), strict=True):
            torch.testing.assert_close(grad, sum(parts), rtol=1e-4, atol=1e-6)


def _written_behind(comm: Any) -> float:
    net = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(net, comm, shards=SHARDS)
    for _ in range(2):
        for _ in model.each_shard():
            model(torch.ones(1, 1)).sum().backward()
        assert net.weight.grad is not None
        net.weight.data -= 0.1 * net.weight.grad  # no version counter sees this
    return net.weight.grad.item()


def test_step_that_writes_to_data_begins_new_gradients(one: RankPool) -> None:
    assert one.run(_written_behind) == [1.0]


def _unfrozen(comm: Any) -> Any:
    net = network()
    net[0].weight.requires_grad_(False)
    model = DistributedDataParallel(net, comm, shards=SHARDS)
    net[0].weight.requires_grad_(True)
    for shard in model.each_shard():
        loss_of(model, 0, shard).backward()
    return net[0].weight.grad.clone()


def test_parameter_unfrozen_before_a_loop_is_followed(pool: RankPool) -> None:
    (expected,) = [
        sum(torch.autograd.grad(loss_of(model, 0, shard), model[0].weight)[0] for shard in range(4))
        for model in [network()]
    ]
    for grad in pool.run(_unfrozen):
        torch.testing.assert_close(grad, expected / SHARDS, rtol=1e-4, atol=1e-6)


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
        "max_norm": nn.Embedding(4, 2, max_norm=1.0),
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
        "max_norm",
    ],
)
def test_options_that_exclude_shards_are_refused_by_name(one: RankPool, case: str) -> None:
    text = one.run(_refused, case)[0]
    assert case in text
    assert "with shards" in text or case == "max_norm"


def _without(comm: Any) -> None:
    DistributedDataParallel(network(), comm).each_shard()


def test_each_shard_of_a_wrapper_without_shards_is_refused(one: RankPool) -> None:
    with pytest.raises(Exception, match="this wrapper has no shards"):
        one.run(_without)
