"""Choice of the transport, which has to be the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from collective.backends.nccl import library
from collective.errors import ConfigError
from collective.start import choice
from collective.start.choice import Choice, across, choose
from collective.start.config import load
from tests.support.interpreter import run_python

Installed = Callable[..., None]

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("nowhere")]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Return a function that sets which packages count as installed."""

    def say(*packages: str) -> None:
        monkeypatch.setattr(choice, "installed", lambda package: package in packages)

    say("torch", "mpi4py")
    return say


def mpich(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local_rank), "MPI_LOCALNRANKS": str(local_size),
    }  # fmt: skip


def torchrun(rank: int, size: int, local_rank: int, local_size: int, hosts: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "GROUP_WORLD_SIZE": str(hosts),
        "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    }  # fmt: skip


def slurm(
    rank: int, size: int, local_rank: int, node: int, tasks: str, hosts: int
) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size), "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local_rank), "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NUM_NODES": str(hosts), "SLURM_STEP_ID": "0",
    }  # fmt: skip


def chosen(environ: dict[str, str], **arguments: object) -> Choice:
    os.environ.clear()
    os.environ.update(environ)
    return choose(load(arguments))


@pytest.mark.parametrize(
    ("backend", "size", "local_size", "name"),
    [
        ("auto", 1, 1, "threads"),
        ("auto", 4, 4, "shm"),
        ("threads", 4, 4, "threads"),
        ("cpu:auto", 2, 2, "shm"),
        ("cpu:gloo,cuda:gloo", 2, 2, "gloo"),
        ("cpu:gloo,cuda:auto", 2, 2, "gloo"),
        ("module:Class", 2, 1, "module:Class"),
        ("gloo", 4, 2, "gloo"),
    ],
)
def test_choose_with_explicit_world_returns_expected_transport(
    installed: Installed, backend: str, size: int, local_size: int, name: str
) -> None:
    world = {"rank": 0, "size": size, "local_rank": 0, "local_size": local_size}
    chosen_transport = chosen({}, backend=backend, **world)
    assert chosen_transport.name == name
    assert len(chosen_transport.reason) > 10


def test_choose_with_named_backend_gives_its_origin_as_reason(installed: Installed) -> None:
    assert "environment COLLECTIVE_BACKEND" in chosen({"COLLECTIVE_BACKEND": "gloo"}).reason


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("cuda:nccl", "names no transport for the CPU; write 'cpu:shm"),
        ("cpu:,cuda:nccl", "names no transport for the CPU"),
        ("cpu:nccl", "Name a transport for the other arrays: 'cpu:auto,cuda:nccl'"),
        ("cpu:shm,cuda:gloo", "for cuda must be nccl, auto, or shm"),
        ("cpu:shm,rocm:rccl", "the devices are cpu and cuda, not rocm"),
    ],
)
def test_choose_with_invalid_device_list_raises_config_error(backend: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chosen({"COLLECTIVE_BACKEND": backend})


@pytest.mark.parametrize(
    ("backend", "across", "over_mpi"),
    [("mpi", "gloo", True), ("hierarchical", "mpi", True), ("hierarchical", "gloo", False),
     ("shm", "mpi", False), ("cpu:mpi,cuda:nccl", "gloo", True)],
)  # fmt: skip
def test_choice_is_over_mpi_if_mpi_moves_data_between_hosts(
    backend: str, across: str, over_mpi: bool
) -> None:
    assert chosen({}, backend=backend, across=across).over_mpi == over_mpi


@pytest.mark.parametrize(
    ("environ", "packages", "name", "crossing"),
    [
        (mpich(1, 2, 0, 1), ("mpi4py", "torch"), "mpi", "mpi"),
        (mpich(1, 2, 0, 1), ("torch",), "tcp", "tcp"),
        (mpich(1, 4, 1, 2), ("mpi4py",), "hierarchical", "mpi"),
        (mpich(1, 4, 1, 2), (), "hierarchical", "tcp"),
        (torchrun(1, 2, 0, 1, 2), ("mpi4py", "torch"), "tcp", "tcp"),
        (torchrun(1, 4, 0, 1, 4), (), "tcp", "tcp"),
        (torchrun(1, 4, 1, 2, 2), (), "hierarchical", "tcp"),
        (slurm(1, 4, 0, 1, "1(x4)", 4), ("mpi4py", "torch"), "tcp", "tcp"),
        (slurm(1, 4, 1, 0, "2(x2)", 2), (), "hierarchical", "tcp"),
        # The tasks of srun --mpi=pmix are an MPI world, too.
        ({**slurm(1, 4, 0, 1, "1(x4)", 4), "PMIX_RANK": "1"}, ("mpi4py", "torch"), "mpi", "mpi"),
    ],
)
def test_choose_across_hosts_returns_expected_transport(
    installed: Installed, environ: dict[str, str], packages: tuple[str], name: str, crossing: str
) -> None:
    installed(*packages)
    chosen_transport = chosen(environ)
    assert chosen_transport.name == name
    assert crossing in chosen_transport.reason
    assert across(load({})) == crossing


@pytest.mark.parametrize(
    ("environs", "name"),
    [
        # 3 ranks on 2 hosts: a rank that is alone on its host must choose like the other ranks.
        ([mpich(0, 3, 0, 2), mpich(1, 3, 1, 2), mpich(2, 3, 0, 1)], "hierarchical"),
        (
            [torchrun(0, 3, 0, 2, 2), torchrun(1, 3, 1, 2, 2), torchrun(2, 3, 0, 1, 2)],
            "hierarchical",
        ),
        (
            [slurm(0, 3, 0, 0, "2,1", 2), slurm(1, 3, 1, 0, "2,1", 2), slurm(2, 3, 0, 1, "2,1", 2)],
            "hierarchical",
        ),
        # 3 ranks on 3 hosts. mpiexec does not tell the ranks how many ranks other hosts have.
        ([mpich(rank, 3, 0, 1) for rank in range(3)], "hierarchical"),
        ([torchrun(rank, 3, 0, 1, 3) for rank in range(3)], "tcp"),
        ([slurm(rank, 3, 0, rank, "1(x3)", 3) for rank in range(3)], "tcp"),
    ],
)
def test_choose_returns_same_transport_on_all_ranks(
    installed: Installed, environs: list[dict[str, str]], name: str
) -> None:
    assert {chosen(environ).name for environ in environs} == {name}


def test_choose_uses_the_named_across_transport(installed: Installed) -> None:
    environ = {**torchrun(1, 4, 1, 2, 2), "COLLECTIVE_ACROSS": "module:Class"}
    chosen_transport = chosen(environ)
    assert chosen_transport.name == "hierarchical"
    assert (
        "module:Class: asked for by name (environment COLLECTIVE_ACROSS)" in chosen_transport.reason
    )


def test_choose_with_arguments_unlike_mpiexec_avoids_mpi(installed: Installed) -> None:
    installed("mpi4py", "torch")
    world = {"rank": 0, "size": 3, "local_rank": 0, "local_size": 1}
    assert across(load(world)) == "tcp"
    assert "tcp" in chosen(mpich(1, 2, 0, 1), **world).reason


@pytest.mark.parametrize(
    ("environ", "missing"), [(mpich(1, 4, 1, 2), True), (torchrun(1, 4, 1, 2, 2), False)]
)
def test_reason_names_mpi4py_if_an_mpi_world_lacks_it(
    installed: Installed, environ: dict[str, str], missing: bool
) -> None:
    installed()
    assert ("mpi4py is not installed" in chosen(environ).reason) == missing


# -- GPUs ---------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets how many GPUs the host shows; NCCL is installed."""
    library_file = tmp_path / "libnccl.so.2"
    library_file.touch()

    def say(count: int) -> None:
        dev = tmp_path / f"dev-{count}"
        dev.mkdir()
        for name in ("null", "nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(count))):
            (dev / name).touch()
        monkeypatch.setattr(choice, "DEVICES", dev)
        monkeypatch.setattr(library, "_in_wheel", lambda: str(library_file))

    return say


@pytest.mark.parametrize(
    ("backend", "size", "local_size", "host", "devices"),
    [
        ("nccl", 1, 1, "threads", "cuda"),
        ("nccl", 4, 4, "shm", "cuda"),
        ("nccl", 4, 2, "hierarchical", "cuda"),
        ("cpu:auto,cuda:nccl", 2, 2, "shm", "cpu,cuda"),
        ("cpu:gloo,cuda:nccl", 2, 2, "gloo", "cpu,cuda"),
        ("cuda:nccl, cpu:threads", 2, 2, "threads", "cpu,cuda"),
    ],
)
def test_choose_nccl_by_name_selects_a_host_transport(
    installed: Installed, backend: str, size: int, local_size: int, host: str, devices: str
) -> None:
    world = {"rank": 0, "size": size, "local_rank": 0, "local_size": local_size}
    chosen_transport = chosen({}, backend=backend, **world)
    assert (chosen_transport.name, chosen_transport.host) == ("nccl", host)
    assert chosen_transport.host == host
    assert chosen_transport.options["devices"] == devices
    assert "asked for by name" in chosen_transport.reason


@pytest.mark.parametrize(
    ("count", "size", "local_size", "name", "host"),
    [
        (0, 2, 2, "shm", "shm"),
        (1, 2, 2, "shm", "shm"),
        (2, 2, 2, "nccl", "shm"),
        (8, 2, 2, "nccl", "shm"),
        (8, 1, 1, "threads", "threads"),
        (2, 4, 2, "nccl", "hierarchical"),
        (1, 4, 2, "hierarchical", "hierarchical"),
        (1, 2, 1, "nccl", "tcp"),
    ],
)
def test_choose_auto_takes_nccl_if_each_rank_has_a_gpu(
    installed: Installed, gpus: Callable[[int], None],
    count: int, size: int, local_size: int, name: str, host: str,
) -> None:  # fmt: skip
    gpus(count)
    chosen_transport = chosen({}, rank=0, size=size, local_rank=0, local_size=local_size)
    assert (chosen_transport.name, chosen_transport.host) == (name, host)
    if name == "nccl":
        assert chosen_transport.options["devices"] == "cpu,cuda"
        assert f"{count} GPUs for {local_size} ranks" in chosen_transport.reason
        assert "libnccl.so.2" in chosen_transport.reason


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0", 1), ("0,3", 2), ("2, 1", 2),
        ("0,-1,1", 1), ("0,4,1", 1), ("GPU-8932f937-d72c,GPU-1d3a", 2), ("MIG-0", 1),
    ],
)  # fmt: skip
def test_gpus_counts_visible_devices_like_cuda(
    gpus: Callable[[int], None], visible: str | None, count: int
) -> None:
    gpus(4)
    os.environ.clear()
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    assert choice.gpus() == count


def test_choose_auto_ignores_gpus_without_nccl(
    installed: Installed, gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(4)
    monkeypatch.setattr(library, "_in_wheel", lambda: None)
    monkeypatch.setattr(library, "_of_system", lambda: None)
    assert chosen({}, rank=0, size=2).name == "shm"
    assert chosen({"COLLECTIVE_NCCL_LIBRARY": "/no/such/file"}, rank=0, size=2).name == "shm"
    assert chosen({"COLLECTIVE_NCCL_LIBRARY": __file__}, rank=0, size=2).name == "nccl"


def test_choose_keeps_connected_host_transport_below_nccl(gpus: Callable[[int], None]) -> None:
    settled = load({"rank": 0, "size": 2})
    for host in ("threads", "mpi"):
        assert choose(settled, host)[0] == host
    gpus(2)
    for host in ("threads", "mpi"):
        chosen_transport = choose(settled, host)
        assert (chosen_transport.name, chosen_transport.host) == ("nccl", host)


def test_choose_imports_neither_torch_nor_mpi4py() -> None:
    program = (
        "import sys; from collective.start.choice import choose; "
        "from collective.start.config import load; "
        "from collective.start.choice import installed; installed('torch'); installed('mpi4py'); "
        "from collective.backends.nccl import library; library.find(); "
        "print(choose(load({'backend': 'gloo'})).name, {'torch', 'mpi4py'} & set(sys.modules), "
        "'libnccl' in open('/proc/self/maps').read())"
    )
    done = run_python("-c", program, env={})
    assert done.stdout == "gloo set() False\n", done.stderr
