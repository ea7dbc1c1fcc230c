"""Ranks on several hosts over the ``tcp`` transport: the start, losses, joins, and the plug-in."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import warm
from tests.support import shard_training
from tests.support.interpreter import ROOT
from tests.support.launches import NOISE_S
from tests.support.network_hosts import Hosts, Job, needs_hosts

pytestmark = pytest.mark.whole

SCRIPT = str(ROOT / "tests" / "support" / "network_host_programs.py")
# Ranks of other tests, in other namespaces, have the other port. The host admits no second process
# of one place.
PORT = {"MASTER_PORT": "29600"}
TCP = {**PORT, "COLLECTIVE_BACKEND": "tcp"}
# Seconds until all ranks know of a loss that the kernel reports.
AT_ONCE_S = 3.0
# How long after its deadline a call may raise. The hub would wait half a second for a rank.
LATE_S = 0.4
# Seconds after which the kernel ends the connections to a host that does not answer.
SILENCE_S = 5.0

Make = Callable[..., Hosts]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that makes hosts; the test's end removes them and all their processes."""
    needs_hosts()
    all_hosts: list[Hosts] = []

    def function(count: int) -> Hosts:
        all_hosts.append(Hosts(count, tmp_path).__enter__())
        return all_hosts[-1]

    yield function
    for hosts in all_hosts:
        hosts.close()


def reports(text: str) -> list[dict[str, Any]]:
    """Return the reports that the ranks printed, sorted by rank."""
    lines = [line.partition("SAID ")[2] for line in text.splitlines() if "SAID " in line]
    each: list[dict[str, Any]] = [ast.literal_eval(line) for line in lines]
    return sorted(each, key=lambda report: report.get("rank", 0))


# -- NumPy alone --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numpy_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of an environment that has NumPy, this project, and no other package."""
    directory = tmp_path_factory.mktemp("alone")
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(directory)], check=True, timeout=60)
    names = {"base": str(directory), "platbase": str(directory)}
    packages = Path(sysconfig.get_path("platlib", "venv", names))
    installed = Path(np.__file__).parent
    for name in (installed.name, "numpy.libs"):
        if (installed.parent / name).exists():
            (packages / name).symlink_to(installed.parent / name)
    return str(directory / "bin" / "python")


@pytest.mark.parametrize(
    ("where", "backend"),
    [("host0:1,host1:1", "tcp"), ("host0:2,host1:2", "hierarchical")],
)
def test_run_on_two_hosts_with_numpy_alone_takes_tcp(
    make: Make, numpy_alone: str, where: str, backend: str
) -> None:
    hosts = make(2)
    path = f"{hosts.ssh()}{os.pathsep}{os.environ['PATH']}"
    command = [numpy_alone, "-m", "collective", "run", "--hosts", where, SCRIPT, "who"]
    text = hosts.start([(0, command, {"PATH": path})]).succeed()
    ranks = reports(text)
    assert {report["backend"] for report in ranks} == {backend}, text
    assert {report["between"] for report in ranks} == {"tcp"}
    assert {report["torch"] for report in ranks} == {False}
    assert len({report["host"] for report in ranks}) == 2


# -- ports --------------------------------------------------------------------------------------

# Has every process write the ports of other hosts to which it connects.
DIALLED = """
    import sys

    def note(event, arguments):
        if event == "socket.connect" and str(arguments[1][0]).startswith("10.77."):
            with open({path!r}, "a") as file:
                file.write(f"{{arguments[1][1]}}\\n")

    sys.addaudithook(note)
    """


@pytest.mark.parametrize("launcher", ["by hand", "collective run"])
def test_hosts_connect_only_to_ports_of_range_and_store(
    make: Make, tmp_path: Path, launcher: str
) -> None:
    hosts = make(2)
    path = tmp_path / "dialled"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        textwrap.dedent(DIALLED.format(path=str(path)))
    )
    variables = {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"}
    variables["COLLECTIVE_PORT"] = "29610-29616"
    if launcher == "by hand":
        job = hosts.by_hand([0, 0, 1, 1], [sys.executable, SCRIPT, "who"], **TCP, **variables)
    else:
        for host in hosts.hosts:
            host.variables.update(variables)
        job = hosts.run(["--hosts", "host0:2,host1:2", SCRIPT, "who"], **variables)
    assert {report["between"] for report in reports(job.succeed())} == {"tcp"}
    ports = set(map(int, path.read_text().split()))
    allowed = {*range(29610, 29617), *([29600] if launcher == "by hand" else [])}
    assert ports <= allowed, ports
    assert len(ports) > 2


# -- losses -------------------------------------------------------------------------------------


def broken(
    hosts: Hosts, spread: list[int], program: list[str], trouble: Callable[[Job], None]
) -> list[dict[str, Any]]:
    """Start ranks over tcp, cause trouble, and return the reports of the ranks that saw an error.

    A report gets ``after``, the seconds since the trouble.
    """
    job = hosts.by_hand(spread, [sys.executable, SCRIPT, *program], **TCP)
    job.until("ready")
    time.sleep(0.5)  # the ranks are in the middle of a call now
    at = time.monotonic()
    trouble(job)
    job.wait()
    failed = [report for report in reports(str(job)) if "kind" in report]
    return [{**report, "after": report["at"] - at} for report in failed]


def names(report: dict[str, Any], rank: int) -> bool:
    """Return whether an error names a rank, beside the rank that has raised it."""
    return re.search(rf"\branks? (\d+, )*{rank}\b(?! of)", report["text"]) is not None


LONG = str(8 << 20)
TIMEOUT_S = 4.0
disasters = pytest.mark.parametrize("disaster", ["cut", "mute"])


@disasters
def test_unreachable_host_ends_long_all_reduce_within_deadline(make: Make, disaster: str) -> None:
    hosts = make(3)
    failed = broken(
        hosts, [0, 1, 2], ["until_it_breaks", LONG, str(TIMEOUT_S)],
        lambda _: getattr(hosts, disaster)(2),
    )  # fmt: skip
    assert [report["rank"] for report in failed] == [0, 1, 2]
    for report in failed:
        assert report["kind"] in ("PeerLostError", "CollectiveTimeoutError"), report
        assert report["seconds"] < TIMEOUT_S + LATE_S, report
    assert [report["ranks"] for report in failed] == [(2,), (2,), (0, 1)], failed


@disasters
def test_unreachable_host_is_lost_peer_at_all_ranks_before_long_deadline(
    make: Make, disaster: str
) -> None:
    hosts = make(3)
    failed = broken(
        hosts, [0, 1, 2], ["until_it_breaks", "3", "60"], lambda _: getattr(hosts, disaster)(2)
    )
    assert [report["kind"] for report in failed] == ["PeerLostError"] * 3, failed
    assert [report["ranks"] for report in failed] == [(2,), (2,), (0, 1)], failed
    for report in failed:
        assert report["after"] < SILENCE_S + AT_ONCE_S, report


@disasters
def test_unreachable_host_ends_waiting_recv_within_deadline(make: Make, disaster: str) -> None:
    hosts = make(2)
    failed = broken(
        hosts, [0, 1], ["receive_until_it_breaks", str(TIMEOUT_S), "1", "none"],
        lambda _: getattr(hosts, disaster)(1),
    )  # fmt: skip
    assert [report["rank"] for report in failed] == [0, 1]
    for report in failed:
        assert report["kind"] in ("PeerLostError", "CollectiveTimeoutError"), report
        assert names(report, 1 - report["rank"]), report
    assert failed[0]["seconds"] < TIMEOUT_S + LATE_S


def test_stopped_rank_is_named_at_deadline(make: Make) -> None:
    hosts = make(3)

    def stop(job: Job) -> None:
        os.kill(job.processes[1].pid, signal.SIGSTOP)
        until_reported(job, {0, 2})
        os.kill(job.processes[1].pid, signal.SIGCONT)

    failed = broken(hosts, [0, 1, 2], ["until_it_breaks", LONG, str(TIMEOUT_S)], stop)
    assert [report["rank"] for report in failed] == [0, 1, 2]
    for report in (failed[0], failed[2]):
        assert report["kind"] == "CollectiveTimeoutError", report
        assert names(report, 1), report
        assert report["seconds"] < TIMEOUT_S + LATE_S


def until_reported(job: Job, ranks: set[int]) -> None:
    """Wait until all of ``ranks`` have reported an error."""
    end = time.monotonic() + NOISE_S
    while {each["rank"] for each in reports(str(job)) if "kind" in each} < ranks:
        assert time.monotonic() < end, job
        time.sleep(0.02)


@pytest.mark.parametrize("victim", [0, 1])
def test_sigkill_in_long_all_reduce_is_lost_peer_at_once_at_all_others(
    make: Make, victim: int
) -> None:
    hosts = make(3)
    failed = broken(
        hosts, [0, 1, 2], ["until_it_breaks", LONG, "60"], lambda job: job.processes[victim].kill()
    )
    assert [report["rank"] for report in failed] == [rank for rank in range(3) if rank != victim]
    for report in failed:
        assert (report["kind"], report["ranks"]) == ("PeerLostError", (victim,)), report
        assert report["after"] < AT_ONCE_S, report


def test_sigkill_ends_wait_for_third_rank_at_once(make: Make) -> None:
    hosts = make(3)
    sources = ["none", "none", "1"]
    failed = broken(
        hosts, [0, 1, 2], ["receive_until_it_breaks", "3", *sources],
        lambda job: job.processes[0].kill(),
    )  # fmt: skip
    assert [report["rank"] for report in failed] == [1, 2]
    for report in failed:
        assert (report["kind"], report["ranks"]) == ("PeerLostError", (0,)), report
    assert failed[1]["after"] < AT_ONCE_S, failed[1]


# -- joins --------------------------------------------------------------------------------------

GROWING = """
    import os, time, numpy as np, collective
    if os.environ.get("JOINS"):
        comm = collective.init(join=True)
    else:
        comm = collective.init()
        print("ready", flush=True)
        while comm.all_reduce(np.array([comm.membership.waiting()]), op="min")[0] < JOINERS:
            time.sleep(0.01)
        comm = comm.grow()
    x = np.arange(300_000.0) * (comm.rank + 1)
    total = comm.all_reduce(x)
    assert np.array_equal(total, np.arange(300_000.0) * sum(range(3 + JOINERS)))
    print("SAID", dict(rank=comm.rank, origin=comm.membership.origin, backend=comm.backend))
    """


@pytest.mark.parametrize("joiners", [1, 2])
def test_processes_of_other_hosts_join(make: Make, tmp_path: Path, joiners: int) -> None:
    hosts = make(2 + joiners)
    program = textwrap.dedent(GROWING).replace("JOINERS", str(joiners))
    (tmp_path / "growing.py").write_text(program)
    command = [sys.executable, "growing.py"]
    met = {"COLLECTIVE_BACKEND": "tcp", "COLLECTIVE_SECRET": "of this test, and of nobody else"}
    met["COLLECTIVE_STORE"] = f"tcp://{hosts.hosts[0].address}:{PORT['MASTER_PORT']}"
    place = {"COLLECTIVE_SIZE": "2", "COLLECTIVE_LOCAL_RANK": "0", "COLLECTIVE_LOCAL_SIZE": "1"}
    job = hosts.start(
        [(rank, command, {**met, **place, "COLLECTIVE_RANK": str(rank)}) for rank in range(2)]
    )
    job.until("ready")
    joining = hosts.start([(2 + k, command, {**met, "JOINS": "1"}) for k in range(joiners)])
    text = job.succeed() + joining.succeed()
    origin = tuple(range(2 + joiners))
    assert reports(text.replace("ready\n", "")) == [
        {"rank": rank, "origin": origin, "backend": "tcp"} for rank in origin
    ]


def test_elastic_training_between_hosts_has_the_bits_of_one_rank(make: Make) -> None:
    pytest.importorskip("torch")
    hosts = make(3)
    alone = [warm.python(), shard_training.__file__, "torch", "lenet", "8"]
    (digest, _) = hosts.start([(0, alone, {})]).succeed().split()
    where = ["--hosts", "host0:1,host1:2", "--spares", "host2:1", "--min-ranks", "1"]
    command = ["--backend", "tcp", shard_training.__file__, "torch", "lenet", "8", "2@2", "1@4"]
    text = hosts.run([*where, *command]).succeed(2 * NOISE_S)
    ends = re.findall(rf"^\[\d+\] ({digest}) ([\d ]+)$", text, re.MULTILINE)
    assert len(ends) == 3, text
    assert {size for _, sizes in ends for size in sizes.split()} >= {"2", "3"}, text


# -- PyTorch's plug-in --------------------------------------------------------------------------

DDP = """
    import hashlib, os, torch, torch.distributed as dist
    import collective.adapters.torch
    torch.set_num_threads(1)
    dist.init_process_group(os.environ["GROUP"])
    torch.manual_seed(3)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10)
    )
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    weights = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    backend = dist.group.WORLD.comm.backend if os.environ["GROUP"] == "collective" else "gloo"
    digest = hashlib.sha256(weights).hexdigest()
    print("SAID", dict(rank=dist.get_rank(), backend=backend, digest=digest))
    dist.destroy_process_group()
    """


def test_ddp_over_plugin_between_hosts_has_bits_of_gloo(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    hosts = make(2)
    (tmp_path / "ddp.py").write_text(textwrap.dedent(DDP))
    digests = {}
    for group in ("collective", "gloo"):
        variables = {**PORT, "GROUP": group, "GLOO_SOCKET_IFNAME": "eth0"}
        ranks = reports(hosts.by_hand([0, 1], [warm.python(), "ddp.py"], **variables).succeed())
        assert [report["rank"] for report in ranks] == [0, 1]
        assert {report["backend"] for report in ranks} == {"tcp" if group != "gloo" else group}
        (digests[group],) = {report["digest"] for report in ranks}
    assert digests["collective"] == digests["gloo"]
