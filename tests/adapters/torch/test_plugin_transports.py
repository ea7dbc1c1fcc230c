"""The process group over every transport, on four ranks, and a program under mpiexec."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from collective.errors import MismatchError  # noqa: E402
from collective.testing import RankPool  # noqa: E402
from tests.support.mpi_launches import (  # noqa: E402
    ROOT,
    VENDORS,
    mpirun,
    needs,
    warm_launch_of,
    warm_python_of,
)
from tests.support.on_ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.whole


@pytest.fixture(
    scope="module",
    params=[
        "threads",
        "shm",
        "tcp",
        "gloo",
        *(pytest.param(f"mpi {vendor}", marks=needs(vendor)) for vendor in VENDORS),
    ],
)
def four(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Yield four ranks of a transport."""
    name, _, vendor = request.param.partition(" ")
    launch = warm_launch_of(vendor) if vendor else None
    with RankPool(4, name, timeout=60.0, mpiexec=launch) as pool:
        yield pool


def made(comm: Any) -> Any:
    """Return a new process group over the ranks of ``comm``."""
    from collective.adapters.torch.process_group import ProcessGroup

    group = ProcessGroup(comm.dup())
    # A call that one rank refuses by itself breaks the group. No rank may still be on its way into
    # the group then.
    comm.barrier()
    return group


@on_ranks("four")
def test_group_reductions_on_four_ranks_are_exact(comm: Any) -> None:
    group, rank, size = made(comm), comm.rank, comm.size
    total = size * (size + 1) // 2
    for count in (3, 50_000):
        for _ in range(3):  # first in ordinary memory, later in symmetric memory
            x = torch.full((count,), rank + 1.0)
            group.allreduce([x]).wait()
            assert x.unique().tolist() == [total]
        group.allreduce([x.fill_(rank)], dist.ReduceOp.MAX).wait()
        assert x.unique().tolist() == [size - 1]
        piece = torch.empty(count, dtype=torch.int64)
        whole = torch.arange(size).repeat_interleave(count) + rank
        group.reduce_scatter_single(piece, whole).wait()
        assert piece.unique().tolist() == [rank * size + total - size]
        x = torch.full((count,), rank + 1.0, dtype=torch.bfloat16)
        group.reduce([x], 1, dist.ReduceOp.SUM).wait()
        assert x.unique().tolist() == [total if rank == 1 else rank + 1]
    both = [torch.ones(5), torch.ones(2, 2)]
    group.allreduce_coalesced(both).wait()
    assert {n for x in both for n in x.flatten().tolist()} == {float(size)}
    group.shutdown()


@on_ranks("four")
def test_group_data_movement_on_four_ranks_is_exact(comm: Any) -> None:
    group, rank, size = made(comm), comm.rank, comm.size
    for count in (2, 30_000):
        x = torch.full((count,), rank)
        group.broadcast([x], 2).wait()
        assert x.unique().tolist() == [2]
        outs = [torch.empty(count, dtype=torch.int64) for _ in range(size)]
        group.allgather([outs], [torch.full((count,), rank)]).wait()
        assert [out.unique().tolist() for out in outs] == [[r] for r in range(size)]
        x = torch.empty(size, count, dtype=torch.int64)
        group.all_gather_single(x, torch.full((count,), rank)).wait()
        assert x[:, -1].tolist() == list(range(size))
        out = torch.empty(size * count, dtype=torch.int64)
        source = torch.arange(size).repeat_interleave(count) + 10 * rank
        group.all_to_all_single(out, source).wait()
        assert out[::count].tolist() == [10 * r + rank for r in range(size)]
        outs = [torch.empty(count, dtype=torch.int64) for _ in range(size)] if rank == 3 else []
        group.gather([outs], [torch.full((count,), rank)], 3).wait()
        assert [out[0].item() for out in outs] == (list(range(size)) if rank == 3 else [])
        source = [torch.full((count,), 7 * r) for r in range(size)] if rank == 1 else []
        group.scatter([x[0]], [source], 1).wait()
        assert x[0].unique().tolist() == [7 * rank]
    group.barrier().wait()
    group.shutdown()


@on_ranks("four")
def test_group_messages_on_four_ranks_arrive(comm: Any) -> None:
    group, rank, size = made(comm), comm.rank, comm.size
    for count in (1, 40_000):
        out = torch.empty(count)
        sent = group.send([torch.full((count,), 1.0 * rank)], (rank + 1) % size, 3)
        received = group.recv([out], (rank - 1) % size, 3)
        # A collective runs while the messages are in flight.
        x = torch.ones(count)
        group.allreduce([x]).wait()
        sent.wait()
        received.wait()
        assert out.unique().tolist() == [(rank - 1) % size]
        assert x.unique().tolist() == [size]
    pair = group.split_group([1, 3])
    assert (pair is None) == (rank in (0, 2))
    if pair is not None:
        x = torch.full((3,), rank)
        pair.allreduce([x]).wait()
        assert x.tolist() == [4] * 3
        pair.shutdown()
    group.shutdown()


def filled(*lengths: int) -> list[Any]:
    """Return a tensor of each length, filled with -1."""
    return [torch.full((length,), -1.0) for length in lengths]


# Lengths for four ranks, of one total.
EQUAL, UNEVEN = [3, 3, 3, 3], [3, 2, 4, 3]


def gather_of_uneven(group: Any, rank: int, unit: int) -> list[Any]:
    outs = filled(*(unit * n for n in EQUAL)) if rank == 0 else []
    group.gather([outs], filled(unit * UNEVEN[rank]), 0).wait()
    return outs


def gather_into_uneven(group: Any, rank: int, unit: int) -> list[Any]:
    outs = filled(*(unit * n for n in UNEVEN)) if rank == 0 else []
    group.gather([outs], filled(unit * 3), 0).wait()
    return outs


def all_to_all_of_uneven(group: Any, rank: int, unit: int) -> list[Any]:
    outs = filled(*(unit * n for n in EQUAL))
    sent = [2, 3, 4, 3] if rank == 1 else EQUAL
    group.alltoall(outs, filled(*(unit * n for n in sent))).wait()
    return outs


def all_to_all_into_uneven(group: Any, rank: int, unit: int) -> list[Any]:
    received = [2, 3, 4, 3] if rank == 1 else EQUAL
    (out,) = filled(12 * unit)
    group.all_to_all_single(out, torch.ones(12 * unit), [unit * n for n in received], []).wait()
    return [out]


def all_to_all_of_other_totals(group: Any, rank: int, unit: int) -> list[Any]:
    n = 4 * unit * (2 if rank == 1 else 3)
    (out,) = filled(n)
    group.all_to_all_single(out, torch.ones(n)).wait()
    return [out]


COMPARED = {
    gather_of_uneven: (1, 2, 0, 3),
    gather_into_uneven: (1, 3, 0, 2),
    all_to_all_of_uneven: (1, 2, 0, 3),
    all_to_all_into_uneven: (0, 3, 1, 2),
    all_to_all_of_other_totals: (0, 3, 1, 2),
}


@pytest.mark.parametrize("call", COMPARED)
@on_ranks("four")
def test_lengths_that_do_not_fit_raise_on_every_rank(comm: Any, call: Callable[..., Any]) -> None:
    group, (sender, sent, receiver, expected) = made(comm), COMPARED[call]
    for unit in (1, 30_000):
        pair = f"rank {sender} sends {unit * sent} to rank {receiver}, which expects"
        with pytest.raises(MismatchError, match=f"{pair} {unit * expected}"):
            call(group, comm.rank, unit)
    group.barrier().wait()
    group.shutdown()


@on_ranks("four")
def test_gather_of_uneven_tensors_fills_a_list_that_fits(comm: Any) -> None:
    group, rank = made(comm), comm.rank
    for unit in (1, 30_000):
        outs = filled(*(unit * n for n in UNEVEN)) if rank == 0 else []
        group.gather([outs], [torch.full((unit * UNEVEN[rank],), float(rank))], 0).wait()
        assert [out.unique().tolist() for out in outs] == ([[0], [1], [2], [3]] * (rank == 0))
    group.shutdown()


def scatter_to_another_length(group: Any, rank: int) -> None:
    group.scatter(filled(4 if rank == 2 else 3), [filled(*EQUAL)] if rank == 0 else [], 0).wait()
    group.barrier().wait()  # without an answer from rank 2, rank 0 learns of it in its next call


def all_gather_of_another_length(group: Any, rank: int) -> None:
    group.allgather([filled(*EQUAL)], filled(4 if rank == 2 else 3)).wait()


def all_gather_single_to_another_length(group: Any, rank: int) -> None:
    group.all_gather_single(*filled(16 if rank == 2 else 12), *filled(3)).wait()


def reduce_scatter_to_another_length(group: Any, rank: int) -> None:
    group.reduce_scatter(filled(4 if rank == 2 else 3), [filled(*EQUAL)]).wait()


def reduce_scatter_single_of_another_length(group: Any, rank: int) -> None:
    group.reduce_scatter_single(*filled(3), *filled(16 if rank == 2 else 12)).wait()


@pytest.mark.parametrize(
    ("call", "pair"),
    [
        (scatter_to_another_length, "rank 0 sends 3 to rank 2, which expects 4"),
        (all_gather_of_another_length, "rank 2 sends 4 to rank 2, which expects 3"),
        (all_gather_single_to_another_length, "rank 2 sends 3 to rank 2, which expects 4"),
        (reduce_scatter_to_another_length, "rank 2 sends 3 to rank 2, which expects 4"),
        (reduce_scatter_single_of_another_length, "rank 2 sends 4 to rank 2, which expects 3"),
    ],
)
@on_ranks("four")
def test_length_of_one_rank_that_does_not_fit_raises_on_every_rank(
    comm: Any, call: Callable[..., Any], pair: str
) -> None:
    group = made(comm)
    with pytest.raises(MismatchError, match=pair):
        call(group, comm.rank)
    group.shutdown()


PROGRAM = """
import torch
import torch.distributed as dist
from mpi4py import MPI
import collective.adapters.torch

store = dist.FileStore(STORE, MPI.COMM_WORLD.size)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
dist.init_process_group("collective", store=store, rank=rank, world_size=size)
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for _ in range(3):
    model.zero_grad()
    model(torch.ones(3, 4) * (rank + 1)).sum().backward()
assert torch.equal(model.module.weight.grad, torch.full((2, 4), 3 * (size + 1) / 2))
pair = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    x = torch.ones(3)
    dist.all_reduce(x, group=pair)
    assert x.tolist() == [2, 2, 2]
found = [None] * size
dist.all_gather_object(found, {"rank": rank})
assert [each["rank"] for each in found] == list(range(size))
if rank == 0:
    print(dist.group.WORLD.comm.backend, size)
dist.destroy_process_group()
"""


@needs("mpich")
def test_process_group_runs_under_mpiexec(tmp_path: Any) -> None:
    script = PROGRAM.replace("STORE", repr(str(tmp_path / "store")))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    changes = {"COLLECTIVE_BACKEND": "mpi", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    assert "mpi 3\n" in mpirun("mpich", 3, script, python=warm_python_of("mpich"), **changes).stdout


WITHOUT_VARIABLES = """
import torch
import torch.distributed as dist
import collective.adapters.torch

for _ in range(2):  # a program may meet again
    dist.init_process_group("collective")
    x = torch.ones(3)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        print(f"1 of {x[0]:g} over {dist.group.WORLD.comm.backend}")
    dist.destroy_process_group()
"""


@needs("mpich")
def test_init_process_group_under_mpiexec_needs_no_variables_of_torch() -> None:
    python = warm_python_of("mpich")
    output = mpirun("mpich", 2, WITHOUT_VARIABLES, python=python, COLLECTIVE_BACKEND="auto").stdout
    assert output == "1 of 2 over shm\n" * 2
