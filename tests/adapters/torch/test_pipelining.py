"""Unmodified torch.distributed.pipelining over our transports, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from tests.support.mpi_launches import ROOT, mpirun, needs, warm_python_of  # noqa: E402
from tests.support.selection import in_whole  # noqa: E402
from tests.support.torch_groups import run_in_group  # noqa: E402

WIDTH, SAMPLES, MICROBATCHES, CLOSE = 24, 16, 4, 1e-12
# The number of stages per rank; torch's schedules for several stages take a list of them.
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}


def stages(count: int) -> list[Any]:
    torch.manual_seed(7)
    return [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64), torch.nn.Tanh())
        for _ in range(count)
    ]


def batch() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, SAMPLES, WIDTH, generator=generator).double())


def step(rank: int, size: int, name: str) -> Any:
    """Return the gradients of this rank's stages by stage number, and the last stage's losses."""
    # Takes as long as the import of PyTorch, so only ranks import it, and no collection of tests.
    from torch.distributed import pipelining

    stages_per_rank = SCHEDULES[name]
    modules = stages(stages_per_rank * size)
    own_stages = [
        pipelining.PipelineStage(modules[at], at, stages_per_rank * size, torch.device("cpu"))
        for at in range(rank, stages_per_rank * size, size)
    ]
    kind = pipelining.schedules.get_schedule_class(name)
    schedule = kind(
        own_stages[0] if stages_per_rank == 1 else own_stages,
        MICROBATCHES,
        loss_fn=torch.nn.functional.mse_loss,
    )
    x, target = batch()
    losses: list[Any] = []
    inputs = (x,) if rank == 0 else ()
    if rank == size - 1:
        schedule.step(*inputs, target=target, losses=losses)
    else:
        schedule.step(*inputs)
    gradients = {
        stage.stage_index: [p.grad.numpy() for p in stage.submod.parameters()]
        for stage in own_stages
    }
    return gradients, [loss.item() for loss in losses]


def check(results: list[Any], name: str) -> None:
    modules = stages(2 * SCHEDULES[name])
    x, target = batch()
    loss = torch.nn.functional.mse_loss(torch.nn.Sequential(*modules)(x), target)
    loss.backward()
    assert sum(results[-1][1]) / MICROBATCHES == pytest.approx(loss.item(), rel=CLOSE)
    gradients = results[0][0] | results[1][0]
    assert sorted(gradients) == list(range(len(modules)))
    for at, module in enumerate(modules):
        for gradient, parameter in zip(gradients[at], module.parameters(), strict=True):
            expected = parameter.grad.numpy()
            assert abs(gradient - expected).max() <= CLOSE * abs(expected).max()


@pytest.mark.parametrize("transport", ["shm", in_whole("tcp"), in_whole("gloo")])
@pytest.mark.parametrize("name", SCHEDULES)
def test_pipelining_schedule_equals_one_process(name: str, transport: str) -> None:
    check(run_in_group((transport, 2), step, name), name)


PROGRAM = """
import torch.distributed as dist
from mpi4py import MPI
import collective.adapters.torch
from tests.adapters.torch.test_pipelining import check, step

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
dist.init_process_group("collective", store=dist.FileStore(STORE, size), rank=rank, world_size=size)
for name in ("GPipe", "1F1B"):
    found = [None] * size
    dist.all_gather_object(found, step(rank, size, name))
    check(found, name)
if rank == 0:
    print(dist.group.WORLD.comm.backend, "equal")
dist.destroy_process_group()
"""


@pytest.mark.whole
@needs("mpich")
def test_pipelining_schedule_over_mpi_equals_one_process(tmp_path: Path) -> None:
    script = PROGRAM.replace("STORE", repr(str(tmp_path / "store")))
    variables = {"COLLECTIVE_BACKEND": "mpi", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = mpirun("mpich", 2, script, python=warm_python_of("mpich"), **variables)
    assert "mpi equal\n" in done.stdout
