"""What torch gives a backend that its dispatcher knows: hooks, recorder, mixed, shrunk groups."""

from __future__ import annotations

import importlib
import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from collective import CollectiveError  # noqa: E402
from collective.adapters.torch import backend  # noqa: E402
from tests import warm  # noqa: E402
from tests.support.interpreter import ROOT, run_python  # noqa: E402
from tests.support.launches import launched  # noqa: E402
from tests.support.torch_groups import in_groups, run_in_group  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.__version__ < (2, 14), reason="this torch takes no backend written in Python"
)
c10d: Any = importlib.import_module("torch._C._distributed_c10d")


def test_backend_is_the_way_of_this_torch() -> None:
    assert backend.way() == "Backend"


def every_call(rank: int, size: int) -> dict[str, Any]:
    """Return a call of each operation, by the name that hooks see."""
    x, pieces = torch.ones(2), [torch.ones(2) for _ in range(size)]
    long, peer = torch.ones(2 * size), (1 - rank if rank < 2 else rank)
    return {
        "ALLREDUCE": lambda: dist.all_reduce(x),
        "BROADCAST": lambda: dist.broadcast(x, 0),
        "REDUCE": lambda: dist.reduce(x, 0),
        "ALLGATHER": lambda: dist.all_gather_into_tensor(long, x),
        "REDUCE_SCATTER": lambda: dist.reduce_scatter_tensor(x, long),
        "ALLTOALL": lambda: dist.all_to_all_single(long, long),
        "GATHER": lambda: dist.gather(x, pieces if rank == 0 else None, 0),
        "SCATTER": lambda: dist.scatter(x, pieces if rank == 0 else None, 0),
        "BARRIER": dist.barrier,
        "RECV" if rank == 1 else "SEND": lambda: (dist.recv if rank == 1 else dist.isend)(x, peer),
    }


@in_groups(("shm", 2), ("gloo", 3))
def test_hooks_see_every_call(rank: int, size: int) -> None:
    group, before, after = dist.group.WORLD, [], []
    group.register_pre_hook(1, lambda call: before.append((call.name.name, call.op_id)))
    group.register_post_hook(1, lambda call: after.append((call.name.name, call.op_id)))
    calls = every_call(rank, size)
    for call in calls.values():
        call()
    assert len(before) == len(calls)
    assert after == before
    if torch.__version__ < (2, 15):  # later versions give operations other names
        assert [name for name, _ in before] == list(calls)


def dumped_hang(rank: int, size: int, hangs: str, folder: str) -> None:
    recorder = c10d.FlightRecorderHook.attach(dist.group.WORLD)
    store = dist.group.WORLD.get_group_store()
    calls = every_call(rank, size)
    for call in calls.values():
        call()
    if rank != 1:
        dist.set_timeout(timedelta(seconds=0.5))
        # The first rank whose call expires aborts the others' calls.
        with pytest.raises(CollectiveError):
            calls[hangs]()
        store.set(f"over-{rank}", "")
    store.wait([f"over-{other}" for other in range(size) if other != 1])
    page = (ROOT / "docs" / "torch-plugin.md").read_text()
    recipe = re.search(r"\n(dump = .*?)```", page, re.DOTALL)
    assert recipe is not None
    code = recipe[1].replace("dumps/", f"{folder}/")
    exec(code, {"dist": dist, "pickle": pickle, "torch": torch, "Path": Path})
    recorder.remove()


@pytest.mark.parametrize("hangs", ["ALLREDUCE", "REDUCE", "GATHER"])
@pytest.mark.skipif(
    torch.__version__ >= (2, 15), reason="torch attaches a recorder of its own, with other names"
)
def test_torchs_analyser_names_the_missing_rank_of_a_hang(
    hangs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    run_in_group(("shm", 3), dumped_hang, hangs, str(tmp_path))
    done = run_python("-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path))
    printed = done.stdout + done.stderr
    assert "missing ranks: {1}" in printed
    assert "has errors" not in printed


def again(backends: str, rank: int, size: int, folder: Path) -> None:
    """Make the default group anew, of these backends."""
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "again"), size)
    dist.init_process_group(backends, store=store, rank=rank, world_size=size)


@in_groups(("shm", 2))
def test_group_has_another_backend_for_another_device(rank: int, size: int, tmp_path: Path) -> None:
    again("cpu:collective,cuda:gloo", rank, size, tmp_path)
    group, x = dist.group.WORLD, torch.ones(2)
    assert isinstance(group._get_backend(torch.device("cuda")), c10d.ProcessGroupGloo)
    assert group.comm.backend == "shm"
    dist.all_reduce(x)
    assert x.tolist() == [size, size]
    half = dist.new_group([0, 1], backend="gloo")
    work = dist.all_reduce(x, group=half, async_op=True)
    work.wait()
    # Works of other backends answer by themselves.
    assert (work.is_completed(), work.result()[0].tolist()) == (True, [2 * size, 2 * size])
    with pytest.raises(AttributeError, match="no backend"):
        half.comm  # noqa: B018


@in_groups(("shm", 2))
def test_group_in_torchs_detailed_debugging_has_its_comm(
    rank: int, size: int, tmp_path: Path
) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        again("collective", rank, size, tmp_path)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert dist.group.WORLD.comm.all_reduce(x).tolist() == [size * size] * 2


@in_groups(("shm", 2))
def test_torch_whose_backend_has_changed_gets_a_process_group(
    rank: int, size: int, tmp_path: Path
) -> None:
    with mock.patch.object(backend, "_METHODS", ["allreduce_of_next_year"]):
        older = backend.way.__wrapped__()
    assert older == "ProcessGroup"
    with mock.patch.object(backend, "way", return_value=older):
        again("collective", rank, size, tmp_path)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert (type(dist.group.WORLD).__name__, x.tolist()) == ("ProcessGroup", [size, size])


@in_groups(("shm", 3))
def test_shrink_group_goes_on_without_the_ranks_that_it_excludes(rank: int, size: int) -> None:
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["shrunk"])
        return
    dist.shrink_group([1])
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    assert (dist.get_rank(), dist.get_world_size(), x.tolist()) == (rank // 2, 2, [2.0, 2.0])
    store.set("shrunk", "")


LOSSES = """
import signal
import torch, torch.distributed as dist
import collective, collective.adapters.torch

store = dist.FileStore("meeting", size)
dist.init_process_group("collective", store=store, rank=rank, world_size=size)

def lose(*ranks):
    if rank in ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except collective.PeerLostError:
        pass

lose(0)
dist.shrink_group([0])
x = torch.full((2,), float(rank))
dist.all_reduce(x)
print(dist.get_rank(), dist.get_world_size(), x.tolist())
lose(2, 3)
try:
    dist.shrink_group([1])
except collective.PeerLostError as error:
    print(error)
"""


def test_shrink_group_after_losses_needs_all_lost_ranks(tmp_path: Path) -> None:
    with launched(tmp_path, warm.python()) as launches:
        done = launches.run("-n", "4", "--min-ranks", "1", launches.script(LOSSES))
    for rank in (1, 2, 3):
        assert f"[{rank}] {rank - 1} 3 [6.0, 6.0]\n" in done.stdout, done.stderr
    assert "[1] shrink_group: 1 rank is left without ranks [1] (expected 2)" in done.stdout
