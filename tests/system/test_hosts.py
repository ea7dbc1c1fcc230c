"""Several real hosts: network namespaces with an address, a name and a TMPDIR each."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreter import ROOT, printed
from tests.support.mpi_launches import by_vendor
from tests.support.network_hosts import Hosts, Job, needs_hosts

pytestmark = pytest.mark.whole

SCRIPT = str(ROOT / "tests" / "support" / "network_host_programs.py")

Make = Callable[..., Hosts]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that makes hosts; the test's end removes them and all their processes."""
    needs_hosts()
    all_hosts: list[Hosts] = []

    def function(count: int, delay: float | None = None) -> Hosts:
        hosts = Hosts(count, tmp_path, delay=delay).__enter__()
        all_hosts.append(hosts)
        return hosts

    yield function
    for hosts in all_hosts:
        hosts.close()


def _printed(text: str) -> list[dict[str, Any]]:
    """Return the reports that the ranks printed, sorted by rank."""
    lines = [line for line in text.splitlines() if line.startswith("SAID ")]
    reports: list[dict[str, Any]] = [ast.literal_eval(line[5:]) for line in lines]
    return sorted(reports, key=lambda report: report.get("rank", 0))


def _assert_nothing_left(hosts: Hosts) -> None:
    # A launcher's daemons may outlive it by a moment.
    end = time.monotonic() + 10.0
    while hosts.living() and time.monotonic() < end:
        time.sleep(0.05)
    assert hosts.living() == []
    assert hosts.run_directories() == []


# -- the hosts themselves ---------------------------------------------------------------------


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout.decode()


def test_hosts_have_own_name_address_and_directory(make: Make) -> None:
    hosts = make(3)
    script = "hostname; cat /proc/net/fib_trie | grep -m1 -o '10[.]77[.]0[.][1-9]'; echo $TMPDIR"
    for number, host in enumerate(hosts.hosts):
        shown = hosts.start([(number, ["sh", "-c", script], {})]).succeed(10.0).split()
        assert shown == [host.name, host.address, str(host.directory)]


def test_hosts_leave_no_namespace_and_no_process(tmp_path: Path) -> None:
    needs_hosts()
    with Hosts(2, tmp_path) as hosts:
        job = hosts.start([(0, ["sleep", "1000"], {})])
        name = hosts.hosts[0].namespace
        assert name in _namespaces()
    assert name not in _namespaces()
    assert job.processes[0].poll() == -signal.SIGKILL


def test_hosts_of_dead_runs_are_swept(tmp_path: Path) -> None:
    needs_hosts()
    body = (
        "import os, pathlib, tests.support.network_hosts as t\n"
        f"hosts = t.Hosts(2, pathlib.Path({str(tmp_path)!r})).__enter__()\n"
        "hosts.start([(0, ['sleep', '1000'], {})])\n"
        "while not hosts.living(): pass\n"
        "print(hosts.hosts[0].namespace, *hosts.living(), flush=True)\n"
        "os._exit(0)\n"
    )
    name, *pids = printed("-c", body).split()
    assert name in _namespaces()
    assert pids
    (tmp_path / "again").mkdir()
    with Hosts(2, tmp_path / "again"):
        assert name not in _namespaces()
        for pid in pids:
            # Its parent may not have reaped it yet, so a zombie counts as ended.
            state = Path(f"/proc/{pid}/stat")
            assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


# -- launchers --------------------------------------------------------------------------------


def _hold_two_by_two(text: str) -> None:
    reports = _printed(text)
    assert [report["rank"] for report in reports] == [0, 1, 2, 3], text
    assert [report["host"] for report in reports] == ["host0", "host0", "host1", "host1"]
    assert {report["backend"] for report in reports} == {"hierarchical"}
    assert [report["local"] for report in reports] == [(0, 2), (1, 2)] * 2
    assert [report["here"] for report in reports] == [(0, 2, "shm"), (1, 2, "shm")] * 2
    assert [Path(report["tmpdir"]).name for report in reports] == ["host0"] * 2 + ["host1"] * 2


def test_ranks_by_hand_on_two_hosts_meet(make: Make) -> None:
    hosts = make(2)
    _hold_two_by_two(hosts.by_hand([0, 0, 1, 1], [sys.executable, SCRIPT, "who"]).succeed())
    _assert_nothing_left(hosts)


def test_ranks_of_torchrun_on_two_hosts_meet(make: Make) -> None:
    pytest.importorskip("torch")
    hosts = make(2)
    _hold_two_by_two(hosts.torchrun(2, [SCRIPT, "who"]).succeed())
    _assert_nothing_left(hosts)


# Options that request two ranks on each host, started through a remote shell.
_OPTIONS: dict[str, Callable[[str], list[str]]] = {
    "mpich": lambda shell: [
        *("-launcher", "ssh", "-launcher-exec", shell, "-hosts", "host0:2,host1:2", "-n", "4"),
    ],
    "openmpi": lambda shell: [
        *("--allow-run-as-root", "--mca", "plm_ssh_agent", shell, "-x", "PYTHONPATH"),
        *("--host", "host0:2,host1:2", "-n", "4"),
    ],
}


@by_vendor
def test_ranks_of_mpiexec_on_two_hosts_meet(make: Make, vendor: str) -> None:
    hosts = make(2)
    options = _OPTIONS[vendor](str(hosts.remote_shell()))
    _hold_two_by_two(hosts.mpiexec(ROOT / ".mpi" / vendor, options, [SCRIPT, "who"]).succeed())
    _assert_nothing_left(hosts)


def test_ranks_on_three_hosts_in_mixed_order_meet(make: Make) -> None:
    hosts = make(3)
    reports = _printed(hosts.by_hand([0, 1, 0, 2, 1, 0], [sys.executable, SCRIPT, "who"]).succeed())
    assert [report["host"] for report in reports] == [f"host{n}" for n in (0, 1, 0, 2, 1, 0)]
    assert {report["backend"] for report in reports} == {"hierarchical"}
    assert [report["here"][1] for report in reports] == [3, 2, 3, 1, 2, 3]


def test_ranks_on_four_hosts_with_one_rank_each_meet(make: Make) -> None:
    reports = _printed(make(4).by_hand([0, 1, 2, 3], [sys.executable, SCRIPT, "who"]).succeed())
    assert [report["host"] for report in reports] == ["host0", "host1", "host2", "host3"]
    assert {report["backend"] for report in reports} <= {"tcp", "hierarchical"}


@pytest.mark.parametrize("spread", [[0, 1], [0, 0, 1, 1]])
def test_ranks_listen_only_at_host_address_and_loopback(make: Make, spread: list[int]) -> None:
    hosts = make(2)
    for report in _printed(hosts.by_hand(spread, [sys.executable, SCRIPT, "listening"]).succeed()):
        own = hosts.hosts[spread[report["rank"]]].address
        assert set(report["addresses"]) <= {own, "127.0.0.1"}, report


# -- a network that is slow, or goes away -----------------------------------------------------


def test_barriers_over_slow_network_wait_for_messages(make: Make) -> None:
    delay = 0.02
    hosts = make(2, delay=delay)
    for report in _printed(
        hosts.by_hand([0, 0, 1, 1], [sys.executable, SCRIPT, "barriers"]).succeed()
    ):
        # No rank leaves a barrier before a message from the other host has arrived. A message of
        # the first barrier may have arrived already, as the other host may be ahead.
        assert 3 * report["seconds"] >= 2 * delay * 0.99
        assert report["total"] == 6.0


def _break(hosts: Hosts, count: int, timeout: float, trouble: Callable[[Job], None]) -> list[Any]:
    """Start two ranks on each of two hosts, cause trouble, and return the ranks' reports."""
    command = [sys.executable, SCRIPT, "until_it_breaks", str(count), str(timeout)]
    job = hosts.by_hand([0, 0, 1, 1], command)
    job.until("ready")
    trouble(job)
    job.wait()
    return [report for report in _printed(str(job)) if "kind" in report]


@pytest.mark.parametrize(("victim", "count"), [(1, 10), (2, 1 << 21)])
def test_killed_rank_is_named_on_both_hosts(make: Make, victim: int, count: int) -> None:
    hosts = make(2)

    def kill(job: Job) -> None:
        job.processes[victim].kill()

    reports = _break(hosts, count, 60.0, kill)
    assert [report["rank"] for report in reports] == [rank for rank in range(4) if rank != victim]
    for report in reports:
        assert report["kind"] == "PeerLostError", report
        assert report["ranks"] == (victim,)
    _assert_nothing_left(hosts)


@pytest.mark.parametrize("spread", [[0, 1, 2], [0, 0, 1, 2]], ids=str)
def test_shrink_continues_without_host_of_rank_0_and_its_store(
    make: Make, spread: list[int]
) -> None:
    hosts = make(3)
    job = hosts.by_hand(spread, [sys.executable, SCRIPT, "go_on"])
    job.until("ready")
    hosts.end(0)
    codes = job.wait()
    left = [rank for rank, index in enumerate(spread) if index]
    assert [codes[rank] for rank in left] == [0, 0], str(job)
    for rank in left:
        outcome = _printed(job.text(rank))[-1]
        assert outcome["origin"] == tuple(left)
        assert outcome["total"] == sum(2**survivor for survivor in left)
        assert outcome["agreed"]
    _assert_nothing_left(hosts)


def test_cut_link_ends_calls_on_both_hosts(make: Make) -> None:
    hosts = make(2)
    timeout = 4.0

    def pull(job: Job) -> None:
        hosts.cut(1)

    reports = _break(hosts, 1000, timeout, pull)
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    for report in reports:
        assert report["kind"] in ("PeerLostError", "CollectiveTimeoutError"), report
        # On either host the error names ranks of the other host.
        beyond = "[23]" if report["rank"] < 2 else "[01]"
        assert re.search(rf"\brank {beyond}\b(?! *\])", report["text"]), report
    _assert_nothing_left(hosts)


def test_link_cut_for_a_moment_breaks_nothing(make: Make) -> None:
    hosts = make(2)

    def blink(job: Job) -> None:
        hosts.cut(1)
        time.sleep(0.5)
        hosts.mend(1)
        time.sleep(2.0)
        assert all(process.poll() is None for process in job.processes), str(job)
        os.kill(job.processes[3].pid, signal.SIGKILL)

    reports = _break(hosts, 1000, 60.0, blink)
    assert {report["kind"] for report in reports} == {"PeerLostError"}
    assert {report["ranks"] for report in reports} == {(3,)}


# -- meeting ----------------------------------------------------------------------------------


def test_wrong_master_address_raises_rendezvous_error(make: Make) -> None:
    hosts = make(2)
    job = hosts.by_hand([1], [sys.executable, SCRIPT, "meet", "3"], WORLD_SIZE="2", RANK="1",
                        MASTER_ADDR="10.77.0.99", LOCAL_WORLD_SIZE="1")  # fmt: skip
    (report,) = _printed(job.succeed())
    assert report["kind"] == "RendezvousError"
    assert "10.77.0.99" in report["text"]
    assert "MASTER_ADDR" in report["text"]


def test_rank_that_does_not_start_is_named_on_every_host(make: Make) -> None:
    hosts = make(2)
    job = hosts.by_hand(
        [0, 0, 1], [sys.executable, SCRIPT, "meet", "5"], WORLD_SIZE="4", LOCAL_WORLD_SIZE="2"
    )
    job.wait()
    reports = _printed(str(job))
    assert [report["kind"] for report in reports] == ["RendezvousError"] * 3, str(job)
    for report in reports:
        assert re.search(r"ranks? \[?3\b", report["text"]), report
    _assert_nothing_left(hosts)
