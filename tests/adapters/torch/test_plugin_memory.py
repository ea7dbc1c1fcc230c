"""Memory in which the process group reduces tensors: adopted memory of DDP, or copies."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from collective.backends.shm import memory  # noqa: E402
from collective.errors import MismatchError  # noqa: E402
from collective.testing import run_ranks  # noqa: E402
from tests.support.selection import in_whole  # noqa: E402
from tests.support.torch_groups import in_groups  # noqa: E402

WIDTH = 512  # a layer has a gradient of 1 MiB
STEPS = 6


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))).double()


def batch(step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def trained_alone(size: int) -> Any:
    model = network()
    steps = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        steps.zero_grad()
        for rank in range(size):
            (model(batch(step, rank)).square().mean() / size).backward()
        steps.step()
    return model


def trained(rank: int, size: int, **options: Any) -> Any:
    """Train over the process group, compare with training on one process; return the wrapper."""
    model = torch.nn.parallel.DistributedDataParallel(network(), **options)
    steps = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        steps.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        steps.step()
    for weight, expected in zip(model.parameters(), trained_alone(size).parameters()):
        torch.testing.assert_close(weight, expected)
    return model


def shared() -> int:
    """Return the number of this process's mappings of torch's shared memory."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/torch_")


def in_shared_memory(model: Any) -> list[bool]:
    return [p.grad.untyped_storage().is_shared() for p in model.parameters()]


@in_groups(("shm", 2), ("shm", 3))
def test_ddp_buckets_are_adopted_and_released(rank: int, size: int) -> None:
    before = shared()
    model = trained(rank, size, gradient_as_bucket_view=True)
    assert all(in_shared_memory(model))
    buckets = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    # For each bucket torch has one mapping, and the transport has one of each rank's memory.
    assert shared() - before == len(buckets) * (1 + size)
    # Also train with gradients that are no views of the buckets, and with buckets of one shape.
    for options in ({"bucket_cap_mb": 2.0}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}):
        trained(rank, size, **options)
    # The memory is released after its owner is gone, at the latest by the next call.
    del model
    gc.collect()  # a wrapper refers to itself
    dist.all_reduce(torch.ones(WIDTH * WIDTH))
    assert shared() == before
    trained(rank, size)
    assert shared() > before
    dist.destroy_process_group()
    assert shared() == before


@in_groups(("shm", 2))
def test_tensor_with_shape_of_bucket_is_not_adopted(rank: int, size: int) -> None:
    model = trained(rank, size, gradient_as_bucket_view=True)
    (bucket,) = {p.grad.untyped_storage().nbytes() for p in model.parameters()}
    for _ in range(3):
        other = torch.full((bucket // 8,), 1.0 + rank, dtype=torch.float64)
        dist.all_reduce(other)
        assert not other.untyped_storage().is_shared()
        assert other.unique().tolist() == [size * (size + 1) / 2]
    # One rank reduces adopted memory and the other ordinary memory, as in DDP's join().
    flat = (
        torch.empty(0, dtype=torch.float64)
        .set_(next(model.parameters()).grad.untyped_storage())
        .fill_(1.0 + rank)
    )
    tensor = flat if rank == 0 else flat.clone()
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [size * (size + 1) / 2]


@in_groups(("shm", 2))
def test_ddp_join_with_adopted_buckets_keeps_ranks_equal(rank: int, size: int) -> None:
    model = trained(rank, size, gradient_as_bucket_view=True)
    steps = torch.optim.SGD(model.parameters(), lr=0.01)
    with model.join():
        for step in range(2 + rank):
            steps.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            steps.step()
    states: list[Any] = [None] * size
    dist.all_gather_object(states, [p.detach() for p in model.parameters()])
    for state in states:
        for weight, expected in zip(state, states[0]):
            torch.testing.assert_close(weight, expected)


def extent(array: Any) -> range:
    start = array.__array_interface__["data"][0]
    return range(start, start + array.nbytes)


def is_mapped(extent: range) -> bool:
    """Return whether mappings of this process cover all of ``extent``."""
    at = extent.start
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= at < stop:
            at = stop
    return at >= extent.stop


@in_groups(("shm", 2))
def test_numpy_views_of_moved_gradients_stay_valid(rank: int, size: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=True)
    arrays: list[Any] = []
    for step in range(STEPS):
        model.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        arrays += [p.grad.numpy() for p in model.parameters()]
    assert all(in_shared_memory(model))
    storage = next(model.parameters()).grad.untyped_storage()
    before = weakref.ref(storage.memory_before)
    del model, storage
    gc.collect()
    dist.destroy_process_group()
    # The arrays stay readable and writable, and no new tensor gets their memory.
    others = [torch.full((WIDTH * WIDTH,), 7.0, dtype=torch.float64).numpy() for _ in range(20)]
    for array in arrays:
        own = extent(array)
        assert is_mapped(own)
        array[:] = 1.0
        for other in map(extent, others):
            assert own.stop <= other.start or other.stop <= own.start
    assert before() is not None
    del array
    arrays.clear()
    assert before() is None


def refused(*args: Any) -> Any:
    raise RuntimeError("no shared memory today")


@in_groups(("shm", 2))
def test_ddp_trains_when_rank_cannot_share_memory(rank: int, size: int) -> None:
    for where, name in ((torch.UntypedStorage, "_share_fd_cpu_"), (memory, "map_shared")):
        failure = mock.patch.object(where, name, refused if name[0] == "_" else mock.Mock(
            side_effect=OSError("gone")
        ))  # fmt: skip
        with failure if rank == 1 else contextlib.nullcontext():
            trained(rank, size, gradient_as_bucket_view=True)
        dist.barrier()


@in_groups(("shm", 2))
def test_ddp_without_room_in_shared_memory_trains_unadopted(rank: int, size: int) -> None:
    full = mock.patch.object(os, "statvfs", return_value=mock.Mock(f_bavail=9, f_frsize=4096))
    with full if rank == 0 else contextlib.nullcontext():
        model = trained(rank, size, gradient_as_bucket_view=True)
    assert not any(in_shared_memory(model))


@in_groups(("shm", 2), ("shm", 3), in_whole(("tcp", 2)), in_whole(("gloo", 2)))
def test_adopt_shares_memory_only_over_shm(rank: int, size: int) -> None:
    comm = dist.group.WORLD.comm
    nbytes = 1 << 20
    descriptor = os.memfd_create("theirs")
    os.ftruncate(descriptor, nbytes)
    own = memoryview(mmap.mmap(descriptor, nbytes)).cast("d")
    own[-1] = rank + 1.0
    adopted = comm.inner.adopt(nbytes, lambda: descriptor)
    if comm.backend != "shm":
        assert adopted is None
        return
    os.close(descriptor)
    numbers = adopted.view("float64")
    comm.all_reduce(numbers, out=numbers)
    assert own[-1] == size * (size + 1) / 2
    comm.broadcast(numbers[-4:], root=1, out=numbers[-4:])
    numbers[:] = rank
    assert comm.all_gather(numbers[:2]).tolist() == [r for r in range(size) for _ in (0, 1)]
    assert comm.inner.adopt(8, lambda: 1 // 0 if rank == 0 else os.memfd_create("none")) is None
    with pytest.raises(MismatchError, match="adopt"):
        comm.inner.adopt(64 + rank, lambda: descriptor)
    comm.barrier()


def refuse_to_adopt(comm: Any) -> tuple[bool, float]:
    def move() -> int:
        raise AssertionError("moved")

    refused = comm.inner.adopt(1 << 20, move) is None
    return refused, float(comm.all_reduce(np.ones(1))[0])


def test_adopt_is_off_with_shm_adopt_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVE_DISABLE", "shm_adopt")
    assert run_ranks(2, refuse_to_adopt, backend="shm") == [(True, 2.0)] * 2
