"""Unmodified programs of torch.distributed under launchers, and the registration itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from tests.launches import ROOT, launches  # noqa: F401
from tests.torch_groups import installed

PROGRAM = """
import torch, torch.distributed as dist
import collective.adapters.torch

dist.init_process_group("collective")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(3, 4) * (rank + 1)).sum().backward()
assert torch.equal(model.module.weight.grad, torch.full((2, 4), 3 * (size + 1) / 2))
x = torch.ones(3)
dist.all_reduce(x)
pair = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    dist.all_reduce(x, group=pair)
print(f"rank {rank}: {x[0]:g} over {dist.group.WORLD.comm.backend}")
dist.destroy_process_group()
"""

FAILING = """
import torch, torch.distributed as dist
import collective.adapters.torch
from collective.errors import PeerFailedError

dist.init_process_group("collective")
if dist.get_rank() == 1:
    raise ValueError("the reason")
try:
    dist.all_reduce(torch.ones(3))
except PeerFailedError as error:
    assert error.rank == 1 and "the reason" in error.traceback
    print("told")
"""


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_collective_run(launches: Any, transport: str) -> None:  # noqa: F811
    found = launches.run("-n", "2", "--backend", transport, launches.script(PROGRAM))
    assert found.returncode == 0, found.stderr
    name = "shm" if transport == "auto" else transport
    for rank in range(2):
        assert f"rank {rank}: 4 over {name}" in found.stdout
    launches.assert_nothing_left()


def test_torchrun(launches: Any) -> None:  # noqa: F811
    launches.script(PROGRAM)
    found = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "script.py",
        ],
        cwd=launches.directory, env=launches.environment(OMP_NUM_THREADS="1"),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    for rank in range(2):
        assert f"rank {rank}: 4 over shm" in found.stdout


def test_what_ends_a_rank_is_told_to_the_others(launches: Any) -> None:  # noqa: F811
    found = launches.run("-n", "2", launches.script(FAILING))
    assert found.returncode != 0
    assert "ValueError: the reason" in found.stderr
    assert "told" in found.stdout


def python(program: str, *paths: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(map(str, (*paths, ROOT))), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


ALONE = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("collective", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x, async_op=True).wait()
print(x.tolist(), dist.group.WORLD.comm.backend)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("first", ["", "import torch\nimport collective.adapters.torch\n"])
def test_torch_registers_the_backend_when_it_is_imported(tmp_path: Path, first: str) -> None:
    found = python(first + ALONE, installed(tmp_path), ROOT)
    assert found.stdout == "[1.0, 1.0] threads\n", found.stderr


@pytest.mark.parametrize("first", ["", "import torch\n"])
def test_the_adapter_registers_the_backend_when_it_is_imported(first: str) -> None:
    found = python(first + "import collective.adapters.torch\n" + ALONE, ROOT)
    assert found.stdout == "[1.0, 1.0] threads\n", found.stderr


def test_nothing_of_ours_is_imported_for_the_entry_point(tmp_path: Path) -> None:
    program = """
        import sys
        import torch
        print([name for name in sys.modules if name.partition(".")[0].startswith("collective")])
        print(torch.distributed.Backend.COLLECTIVE)
    """
    found = python("if True:" + program, installed(tmp_path), ROOT)
    assert found.stdout == "['collective_autoload']\ncollective\n", found.stderr


def test_no_more_of_torch_is_imported_for_the_adapter() -> None:
    program = """
        import sys
        import torch
        before = set(sys.modules)
        import collective.adapters.torch
        print([name for name in set(sys.modules) - before if name.startswith("torch")])
    """
    found = python("if True:" + program, ROOT)
    assert found.stdout == "[]\n", found.stderr


def test_the_adapter_imports_where_torch_does_not(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
    program = """
        import collective.adapters.torch
        from collective.adapters.torch import autoload
        autoload.autoload()
        try:
            autoload.register()
        except ImportError as error:
            print(error)
    """
    found = python("if True:" + program, tmp_path, ROOT)
    assert found.stdout == "broken\n", found.stderr


STARTED_BY_HAND = """
import os, torch, torch.distributed as dist, torch.multiprocessing as processes

def main(rank, size):
    dist.init_process_group("collective", rank=rank, world_size=size)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [size, size]
    dist.destroy_process_group()

if __name__ == "__main__":
    # What a launcher would say, but for the rank.
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    listening = dist.TCPStore("localhost", 0, is_master=True)
    os.environ["MASTER_PORT"] = str(listening.port)
    # The store is there already.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    processes.spawn(main, (2,), nprocs=2)
    print("both")
"""


def test_ranks_that_a_program_spawns(launches: Any, tmp_path: Path) -> None:  # noqa: F811
    paths = os.pathsep.join([str(ROOT), installed(tmp_path)])
    (launches.directory / "spawning.py").write_text(STARTED_BY_HAND)
    found = subprocess.run(
        [sys.executable, "spawning.py"], cwd=launches.directory,
        env=launches.environment(OMP_NUM_THREADS="1", PYTHONPATH=paths),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.stdout == "both\n", found.stderr
    launches.assert_nothing_left()
