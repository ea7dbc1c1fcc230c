"""Unmodified training tools of torch over our transports, compared with one process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from collective.errors import UnsupportedError  # noqa: E402
from tests.support.selection import in_whole  # noqa: E402
from tests.support.torch_groups import in_groups  # noqa: E402

STEPS, ROWS = 4, 3
from_2_6 = pytest.mark.skipif(
    torch.__version__ < (2, 6),
    reason="this torch's FSDP2 requires a GPU, and its DTensor fails on two-dimensional meshes",
)


def network() -> Any:
    torch.manual_seed(7)
    # The second layer alone makes a bucket large enough for symmetric memory.
    return torch.nn.Sequential(
        torch.nn.Linear(16, 96), torch.nn.Tanh(), torch.nn.Linear(96, 96), torch.nn.Linear(96, 4)
    )


def batch(step: int, size: int) -> Any:
    return torch.randn(size * ROWS, 16, generator=torch.Generator().manual_seed(step))


def loss(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def alone(size: int, **options: Any) -> list[Any]:
    """Train one process on all rows; return its parameters."""
    model = network()
    steps = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    for step in range(STEPS):
        steps.zero_grad()
        loss(model, batch(step, size)).backward()
        steps.step()
    return [p.detach() for p in model.parameters()]


def mine(step: int, rank: int, size: int) -> Any:
    return batch(step, size)[rank * ROWS : (rank + 1) * ROWS]


def train(model: Any, steps: Any, rank: int, size: int) -> None:
    for step in range(STEPS):
        steps.zero_grad()
        loss(model, mine(step, rank, size)).backward()
        steps.step()


def agree(results: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result.detach(), reference, rtol=tolerance, atol=tolerance)


@in_groups(("shm", 2), in_whole(("tcp", 2)), in_whole(("gloo", 2)), ("shm", 3))
def test_ddp_training_equals_one_process(rank: int, size: int) -> None:
    expected = alone(size)
    for options in (
        {}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True},
        {"static_graph": True}, {"bucket_cap_mb": 0.01, "broadcast_buffers": False},
    ):  # fmt: skip
        model = torch.nn.parallel.DistributedDataParallel(network(), **options)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
        agree(model.parameters(), expected)


@in_groups(("shm", 2), in_whole(("tcp", 2)), in_whole(("gloo", 2)))
def test_ddp_comm_hooks_train_as_one_process(rank: int, size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def plain(state, bucket):  # type: ignore[no-untyped-def]  # torch would check annotations
        work = dist.all_reduce(bucket.buffer().div_(size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=96, start_powerSGD_iter=2)
    # docs/torch-plugin.md says that torch's CPU build refuses this hook.
    bfloat16 = [(None, default_hooks.bf16_compress_hook, 0.1)] if torch.version.cuda else []
    for state, hook, tolerance in (
        *bfloat16,
        (None, plain, 1e-5),
        (None, default_hooks.allreduce_hook, 1e-5),
        (None, default_hooks.fp16_compress_hook, 1e-2),
        (power, powerSGD_hook.powerSGD_hook, 1e-2),
    ):
        model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01)
        model.register_comm_hook(state, hook)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
        agree(model.parameters(), alone(size), tolerance)


@in_groups(("shm", 2))
def test_ddp_no_sync_and_join_keep_ranks_equal(rank: int, size: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(network())
    with model.no_sync():
        loss(model, mine(0, rank, size)).backward()
    loss(model, mine(1, rank, size)).backward()
    reference = network()
    for step in (0, 1):
        loss(reference, batch(step, size)).backward()
    agree([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
    # Rank r has r + 1 batches; a rank without batches shadows the collectives of the others.
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(rank + 1):
            steps.zero_grad()
            loss(model, mine(step, rank, size)).backward()
            steps.step()
    same: list[Any] = [None] * size
    dist.all_gather_object(same, [p.detach() for p in model.parameters()])
    for other in same:
        agree(other, same[0])


@in_groups(("shm", 2), ("shm", 3))
def test_ddp_with_unused_parameters_reduces_all_gradients(rank: int, size: int) -> None:
    class Forked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = torch.nn.ModuleList(network() for _ in range(2))

        def forward(self, x: Any) -> Any:
            return self.ways[rank % 2](x)

    model = torch.nn.parallel.DistributedDataParallel(Forked(), find_unused_parameters=True)
    for step in range(2):
        model.zero_grad()
        loss(model, mine(step, rank, size)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@in_groups(("shm", 2))
def test_ddp_reduces_sparse_embedding_gradients(rank: int, size: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(8, 3, sparse=True))
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([rank, 7])).sum().backward()
    expected = torch.zeros(8, 3)
    expected[:size] = 1.0 / size
    expected[7] += 1
    torch.testing.assert_close(model.module.weight.grad.to_dense(), expected)


@in_groups(("shm", 2), ("shm", 3))
def test_zero_redundancy_optimizer_equals_one_process(rank: int, size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(network())
    momentum = {"lr": 0.1, "momentum": 0.9}
    steps = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **momentum)
    train(model, steps, rank, size)
    agree(model.parameters(), alone(size, momentum=0.9))
    steps.consolidate_state_dict(to=0)


def sharding() -> Any:
    """Return ``fully_shard``, which is in a different module before torch 2.6."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    return fully_shard


@from_2_6
@in_groups(("shm", 2), in_whole(("tcp", 2)), in_whole(("gloo", 2)))
def test_fully_shard_training_equals_one_process(rank: int, size: int) -> None:
    fully_shard, model = sharding(), network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
    agree([p.full_tensor() for p in model.parameters()], alone(size))


@from_2_6
@in_groups(("shm", 2), ("shm", 3))
def test_dtensor_redistribution_and_parallel_module_are_exact(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].size() == size
    assert mesh.get_group("tp").comm.size == size
    assert mesh.get_group("dp").comm.size == 1
    whole = torch.arange(60.0).reshape(5, 12)
    part = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(part.full_tensor(), whole)
    moved = part.redistribute(mesh, [Shard(1), Replicate()])
    assert torch.equal(moved.full_tensor(), whole)
    assert (part @ part.t()).full_tensor().equal(whole @ whole.t())
    assert part.sum().full_tensor() == whole.sum()
    model, x = network(), torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    torch.testing.assert_close(parallelize_module(model, mesh["tp"], plan)(x), network()(x))


@in_groups(("shm", 2))
def test_functional_collectives_return_expected_values(rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    group, x = dist.group.WORLD, torch.full((2 * size,), 1.0 * rank)
    total = size * (size - 1) / 2
    assert torch.equal(functional.all_reduce(x, "sum", group) + 0, torch.full_like(x, total))
    gathered = functional.all_gather_tensor(x, 0, group) + 0
    assert torch.equal(gathered, torch.arange(1.0 * size).repeat_interleave(2 * size))
    scattered = functional.reduce_scatter_tensor(x, "avg", 0, group) + 0
    assert torch.equal(scattered, torch.full((2,), total / size))
    swapped = functional.all_to_all_single(x, None, None, group) + 0
    assert torch.equal(swapped, torch.arange(1.0 * size).repeat_interleave(2))
    assert torch.equal(functional.broadcast(x, 1, group) + 0, torch.ones_like(x))
    several = functional.all_reduce_coalesced([x, x[:1]], "max", group)
    assert [tensor.max().item() for tensor in several] == [size - 1] * 2


@in_groups(("shm", 2))
def test_all_reduce_coalesced_of_tensor_twice_matches_gloo(rank: int, size: int) -> None:
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce_coalesced([x, x])
    assert torch.equal(x, torch.full((3,), 3.0))


@in_groups(("shm", 2))
def test_compiled_ddp_gradients_equal_eager(rank: int, size: int) -> None:
    # Between two compiled pieces DDP broadcasts buffers in C++, and this calls the group.
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(network(), torch.nn.BatchNorm1d(4))
    )
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        x = mine(step, rank, size)
        grads = []
        for wrapper in (model, compiled):
            model.zero_grad()
            loss(wrapper, x).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        agree(*grads)
    same: list[Any] = [None] * size
    dist.all_gather_object(same, grads[0])
    for other in same:
        agree(other, same[0])


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@in_groups(("shm", 2))
def test_compiled_functional_all_reduce_is_right(rank: int, size: int, compiler: str) -> None:
    import torch.distributed._functional_collectives as functional

    def doubled(x: Any) -> Any:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    result = torch.compile(doubled, backend=compiler)(torch.full((3,), 1.0 * rank))
    assert torch.equal(result, torch.full((3,), size * (size - 1) + 1.0))


@in_groups(("shm", 2))
def test_differentiable_functions_return_right_gradients(rank: int, size: int) -> None:
    from torch.distributed.nn import functional

    group = dist.group.WORLD  # the functions' default group dates from the time of their import
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    functional.all_reduce(x * x, group=group).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0 * (rank + 1) * size))
    x.grad = None
    sum(functional.all_gather(x * (rank + 1), group)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 1.0 * size * (rank + 1)))
    x.grad = None
    functional.broadcast(x, 0, group).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 1.0 * size if rank == 0 else 0.0))
    y = torch.full((size,), 1.0, requires_grad=True)
    functional.all_to_all_single(torch.empty(size), y * (rank + 1), group=group).sum().backward()
    torch.testing.assert_close(y.grad, torch.full((size,), rank + 1.0))
    out = functional.reduce_scatter(torch.empty(3), [x.detach()] * size, group=group)
    torch.testing.assert_close(out, torch.full((3,), size * (size + 1) / 2))


@from_2_6
@in_groups(("shm", 2), in_whole(("tcp", 2)), in_whole(("gloo", 2)))
def test_distributed_checkpoint_restores_sharded_model(
    rank: int, size: int, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as checkpoint

    fully_shard = sharding()
    model = fully_shard(network())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    other = fully_shard(network())
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path / "saved")
    other.load_state_dict(state["model"])
    agree(
        [p.full_tensor() for p in other.parameters()], [p.full_tensor() for p in model.parameters()]
    )
    checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path / "later").result()


@in_groups(("shm", 2), in_whole(("tcp", 2)), in_whole(("gloo", 2)))
def test_ddp_backward_with_missing_rank_times_out(rank: int, size: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(network())
    for step in range(3):
        loss(model, mine(step, rank, size)).backward()
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    store = dist.group.WORLD.get_group_store()
    if rank:
        store.wait(["over"], timedelta(seconds=60))
        return
    # DDP's reducer turns the error into a plain RuntimeError if the call ran in a thread.
    with pytest.raises(RuntimeError, match=r"timed out: waited 0\.5 s for rank"):
        loss(model, mine(3, rank, size)).backward()
    store.set("over", "")


@in_groups(("shm", 2), in_whole(("tcp", 2)), in_whole(("gloo", 2)))
def test_ddp_builtin_hooks_train_as_one_process(rank: int, size: int) -> None:
    kinds = dist.BuiltinCommHookType
    for hook, tolerance in ((kinds.ALLREDUCE, 1e-5), (kinds.FP16_COMPRESS, 1e-2)):
        model = torch.nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.01)
        model._register_builtin_comm_hook(hook)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, size)
        agree(model.parameters(), alone(size), tolerance)


@in_groups(("shm", 2))
def test_documented_limits_still_raise(rank: int, size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    # docs/torch-plugin.md lists these limits. If one of the calls works one day, update that page.
    if torch.__version__ < (2, 14):
        with pytest.raises(ValueError, match="only implemented for GLOO"):
            dist.monitored_barrier()
    else:
        dist.monitored_barrier()
    with pytest.raises(RuntimeError, match=r"No device associated|does not support splitting"):
        dist.split_group(split_ranks=[[0], [1]])
    if torch.version.cuda is None:
        model = torch.nn.parallel.DistributedDataParallel(network())
        with pytest.raises(TypeError, match="BF16 all reduce communication hook required CUDA"):
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        torch.nn.SyncBatchNorm(3)(torch.ones(4, 3))
    with pytest.raises(UnsupportedError, match="cannot get more ranks"):
        dist.group.WORLD.merge_remote_group(dist.HashStore(), size + 1)
