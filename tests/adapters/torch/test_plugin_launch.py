"""Unmodified torch.distributed programs under launchers, and registration of the backend."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from tests import warm
from tests.support.interpreter import run_python
from tests.support.launches import ROOT, Launches, launched
from tests.support.torch_groups import installed

pytestmark = pytest.mark.whole

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


@pytest.fixture
def warm_launches(tmp_path: Path) -> Iterator[Launches]:
    """Yield launches whose processes start with PyTorch already imported."""
    with launched(tmp_path, warm.python()) as launches:
        yield launches


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_collective_run_starts_unmodified_program(warm_launches: Launches, transport: str) -> None:
    launches = warm_launches
    done = launches.run("-n", "2", "--backend", transport, launches.script(PROGRAM))
    assert done.returncode == 0, done.stderr
    name = "shm" if transport == "auto" else transport
    for rank in range(2):
        assert f"rank {rank}: 4 over {name}" in done.stdout
    launches.assert_nothing_left()


def test_torchrun_starts_unmodified_program(warm_launches: Launches) -> None:
    warm_launches.script(PROGRAM)
    done = warm_launches.execute(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: 4 over shm" in done.stdout


def test_rank_error_reaches_other_ranks_with_traceback(warm_launches: Launches) -> None:
    done = warm_launches.run("-n", "2", warm_launches.script(FAILING))
    assert done.returncode != 0
    assert "ValueError: the reason" in done.stderr
    assert "told" in done.stdout


UNWAITED = """
import atexit
import torch, torch.distributed as dist
import collective.adapters.torch

dist.init_process_group("collective")
if rank == 0:
    atexit.register(arrive)
    dist.isend(torch.arange(300_000.0), 1)
    dist.irecv(torch.zeros(1), 1)  # which nobody sends
else:
    while not os.path.exists("arrived-0"):
        time.sleep(0.01)
    time.sleep(0.3)  # in which a rank that does not wait has gone
    x = torch.zeros(300_000)
    dist.recv(x, 0)
    print(x[-1].item())
"""


def test_end_of_program_delivers_what_was_sent(warm_launches: Launches) -> None:
    done = warm_launches.run("-n", "2", warm_launches.script(UNWAITED))
    assert (done.returncode, done.stdout) == (0, "[1] 299999.0\n"), done.stderr


CHILD = """
import os, subprocess, sys
import torch, torch.distributed as dist
import collective, collective.adapters.torch

def refused(function, **named):
    try:
        function(**named)
    except collective.errors.ConfigError as error:
        assert "is another process" in str(error), error
        print("refused", flush=True)

if sys.argv[1:]:
    refused(dist.init_process_group, backend="collective")
    refused(collective.init)
else:
    dist.init_process_group("collective")
    subprocess.run([sys.executable, __file__, "child"])
    dist.barrier()
    dist.destroy_process_group()
"""


def test_child_of_rank_is_refused_by_plugin_and_by_init(warm_launches: Launches) -> None:
    (warm_launches.directory / "children.py").write_text(CHILD)
    done = warm_launches.execute(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "children.py"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused\n") == 4


def python(
    program: str, *paths: Path | str, interpreter: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    return run_python(
        "-c", program, python=interpreter,
        env={"PYTHONPATH": ":".join(map(str, (*paths, ROOT))), "PATH": "/usr/bin:/bin"},
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


BY_THE_ENTRY_POINT = """
import sys
import torch
print([name for name in sys.modules if name.partition(".")[0].startswith("collective")])
print(torch.distributed.Backend.COLLECTIVE)
before = set(sys.modules)
"""

NO_MORE_OF_TORCH = """
import collective.adapters.torch
print([name for name in set(sys.modules) - before if name.startswith("torch")])
"""


def test_entry_point_registers_backend_and_imports_nothing_else(
    tmp_path: Path,
) -> None:
    done = python(BY_THE_ENTRY_POINT + NO_MORE_OF_TORCH + ALONE, installed(tmp_path))
    assert done.stdout.splitlines() == [
        "['collective_autoload']",  # modules of this project
        "collective",
        "[]",  # modules of PyTorch that the adapter's import adds; it registers again harmlessly
        "[1.0, 1.0] threads",
    ], done.stderr


# The warm interpreter differs from a fresh one only in having imported PyTorch before.
@pytest.mark.parametrize(
    ("first", "entry_point"),
    [("", True), ("import collective.adapters.torch\n", False),
     ("import torch\nimport collective.adapters.torch\n", False)],
    ids=["entry point alone", "adapter alone", "adapter after torch"],
)  # fmt: skip
def test_backend_is_found_by_entry_point_or_adapter(
    tmp_path: Path, first: str, entry_point: bool
) -> None:
    paths = [installed(tmp_path)] if entry_point else []
    done = python(first + ALONE, *paths, interpreter=warm.python())
    assert done.stdout == "[1.0, 1.0] threads\n", done.stderr


def test_adapter_imports_with_broken_torch(tmp_path: Path) -> None:
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
    done = python("if True:" + program, tmp_path, ROOT)
    assert done.stdout == "broken\n", done.stderr


STARTED_BY_HAND = """
import os, torch, torch.distributed as dist, torch.multiprocessing as processes

def main(rank, size):
    dist.init_process_group("collective", rank=rank, world_size=size)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [size, size]
    dist.destroy_process_group()

if __name__ == "__main__":
    # A launcher would set these variables, and the rank.
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    listening = dist.TCPStore("localhost", 0, is_master=True)
    os.environ["MASTER_PORT"] = str(listening.port)
    # This process already serves the store.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    processes.spawn(main, (2,), nprocs=2)
    print("both")
"""


def test_ranks_spawned_by_program_communicate(warm_launches: Launches, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT), installed(tmp_path)])
    (warm_launches.directory / "spawning.py").write_text(STARTED_BY_HAND)
    done = warm_launches.execute("spawning.py", PYTHONPATH=paths)
    assert done.stdout == "both\n", done.stderr
    warm_launches.assert_nothing_left()
