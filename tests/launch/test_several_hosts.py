"""`collective run --hosts`: starts, outputs, exit codes and ends, as on one host.

Hosts are network namespaces, and ``ssh`` is a stand-in on PATH that enters them.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import collective
from collective.adapters.jax.xla.library import library
from collective.errors import BackendUnavailableError, RendezvousError
from collective.launch.hosts import cluster, launching
from collective.start.host_list import HostSlots
from tests.support.interpreter import ROOT
from tests.support.launches import NOISE_S, PRELUDE, PROMISED_S
from tests.support.network_hosts import DEADLINE_S, Hosts, Job, needs_hosts

pytestmark = pytest.mark.whole

PROGRAMS = str(ROOT / "tests" / "support" / "network_host_programs.py")
TWO_BY_TWO = ("--hosts", "host0:2,host1:2")
Make = Callable[..., Hosts]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Yield a function that makes hosts; the test's end removes them and all their processes."""
    needs_hosts()
    made: list[Hosts] = []

    def function(count: int) -> Hosts:
        made.append(Hosts(count, tmp_path).__enter__())
        return made[-1]

    yield function
    for hosts in made:
        hosts.close()


@pytest.fixture
def hosts(make: Make) -> Hosts:
    return make(2)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a program, with the functions of PRELUDE, and names it."""

    def write(body: str) -> str:
        (tmp_path / "script.py").write_text(PRELUDE + textwrap.dedent(body))
        return "script.py"

    return write


Script = Callable[[str], str]


def until(condition: Callable[[], object], what: object) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"it did not happen in time\n{what}"
        time.sleep(0.02)


def until_arrived(directory: Path, size: int, job: Job) -> None:
    until(lambda: all((directory / f"arrived-{rank}").exists() for rank in range(size)), job)


def assert_nothing_left(hosts: Hosts) -> None:
    until(lambda: not hosts.living(), "processes are left")
    assert hosts.run_directories() == []


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def pids(hosts: Hosts, host: int, *words: str) -> list[int]:
    """Return the ids of the processes of a host whose command line contains all ``words``."""
    return sorted(p for p in hosts.on(host) if all(word in command_of(p) for word in words))


# -- the start --------------------------------------------------------------------------------


def test_ranks_on_two_hosts_have_places_and_prefixes(hosts: Hosts, script: Script) -> None:
    body = """
        import socket
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "COLLECTIVE_LOCAL_RANK", "MASTER_ADDR")
        print(rank, size, socket.gethostname(), *(os.environ[name] for name in names))
        """
    text = hosts.run([*TWO_BY_TWO, script(body)]).succeed()
    assert sorted(text.splitlines()) == [
        "[0] 0 4 host0 0 2 0 10.77.0.1",
        "[1] 1 4 host0 1 2 1 10.77.0.1",
        "[2] 2 4 host1 0 2 0 10.77.0.1",
        "[3] 3 4 host1 1 2 1 10.77.0.1",
    ]
    assert_nothing_left(hosts)


def test_ranks_on_two_hosts_meet_in_store_of_launcher(hosts: Hosts) -> None:
    text = hosts.run([*TWO_BY_TWO, PROGRAMS, "who"]).succeed()
    for rank, host in enumerate(("host0", "host0", "host1", "host1")):
        assert re.search(rf"^\[{rank}\] SAID .*'host': '{host}', 'backend': 'hierarchical'", text,
                         re.MULTILINE), text  # fmt: skip
    assert_nothing_left(hosts)


def test_launcher_on_no_host_of_ranks_starts_them(make: Make, script: Script) -> None:
    hosts = make(3)
    arguments = ["--hosts", "host1,host2", script("import socket; print(socket.gethostname())")]
    assert sorted(hosts.run(arguments).succeed().splitlines()) == ["[0] host1", "[1] host2"]
    assert_nothing_left(hosts)


def test_fewer_ranks_than_slots_fill_first_host(hosts: Hosts, script: Script) -> None:
    body = "import socket; print(socket.gethostname(), os.environ['LOCAL_WORLD_SIZE'])"
    text = hosts.run(["-n", "3", *TWO_BY_TWO, script(body)]).succeed()
    assert sorted(text.splitlines()) == ["[0] host0 2", "[1] host0 2", "[2] host1 1"]


def test_variables_of_launcher_reach_other_hosts(hosts: Hosts, script: Script) -> None:
    body = "print(os.environ['OF_USER'], os.path.basename(os.environ['TMPDIR']))"
    text = hosts.run(["--hosts", "host0,host1", script(body)], OF_USER="a value").succeed()
    assert sorted(text.splitlines()) == ["[0] a value host0", "[1] a value host1"]


def test_secret_is_on_no_command_line(hosts: Hosts, script: Script, tmp_path: Path) -> None:
    body = """
        with open(f"secret-{rank}", "w") as file:
            file.write(os.environ["COLLECTIVE_SECRET"])
        await_all()
        time.sleep(600)
        """
    job = hosts.run(["--hosts", "host0,host1", script(body)])
    until_arrived(tmp_path, 2, job)
    secrets = {(tmp_path / f"secret-{rank}").read_text() for rank in range(2)}
    (secret,) = secrets
    commands = [command_of(pid) for pid in hosts.living()]
    assert len(commands) > 4
    assert not [command for command in commands if secret in command]


def test_standard_input_goes_to_rank_0(hosts: Hosts, script: Script, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"0123456789" * 50_000)
    body = "print(len(sys.stdin.buffer.read()))"
    arguments = ["sh", "-c", 'exec "$@" < input', "sh", sys.executable, "-m", "collective", "run"]
    path = f"{hosts.ssh()}{os.pathsep}{os.environ['PATH']}"
    command = [*arguments, "--hosts", "host1,host0", script(body)]
    text = hosts.start([(0, command, {"PATH": path})]).succeed()
    assert sorted(text.splitlines()) == ["[0] 500000", "[1] 0"]


def test_much_output_of_other_host_arrives_whole(hosts: Hosts, script: Script) -> None:
    body = "for line in range(100_000): print(line, 'x' * 20)"
    lines = hosts.run(["--hosts", "host1", script(body)]).succeed().splitlines()
    assert lines == [f"[0] {line} {'x' * 20}" for line in range(100_000)]


@pytest.fixture
def jax_installed(tmp_path: Path) -> str:
    """Return a PYTHONPATH on which the metadata of jaxlib are, so that `run` takes --jax."""
    try:
        library()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    metadata = tmp_path / "packages" / "jaxlib-0.12.0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.12.0.1\n")
    return f"{ROOT}{os.pathsep}{metadata.parent}"


def test_ranks_of_jax_on_two_hosts_find_coordinator_and_plugin(
    hosts: Hosts, script: Script, jax_installed: str
) -> None:
    body = """
        import socket
        from collective.adapters.jax.xla.detection import place
        coordinator, processes, number = place(os.environ)
        plugin = os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"], os.environ["JAX_PLATFORMS"]
        library = os.path.isfile(os.environ["MPITRAMPOLINE_LIB"])
        print(socket.gethostname(), number, "of", processes, *plugin, library, coordinator)
        """
    arguments = ["--jax", "--hosts", "host0,host1", script(body)]
    lines = sorted(hosts.run(arguments, PYTHONPATH=jax_installed).succeed().splitlines())
    before, _, port = lines[0].rpartition(":")
    assert before == "[0] host0 0 of 2 mpi cpu True 10.77.0.1"
    assert lines[1] == f"[1] host1 1 of 2 mpi cpu True 10.77.0.1:{port}"


def test_ranks_of_mpi4py_on_two_hosts_import_this_packages_module(
    hosts: Hosts, script: Script
) -> None:
    body = """
        import socket
        from mpi4py import MPI
        ranks = MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.rank)
        print(socket.gethostname(), MPI.get_vendor()[0], ranks)
        """
    arguments = ["--mpi4py", "--hosts", "host0,host1", script(body)]
    lines = sorted(hosts.run(arguments).succeed().splitlines())
    assert lines == [f"[{rank}] host{rank} collective [0, 1]" for rank in range(2)]


# -- the end ----------------------------------------------------------------------------------

FAILING = """
    print("rank", rank, "begins")
    sys.stdout.flush()
    await_all()
    if rank == 2:
        raise ValueError("what rank 2 did not like")
    time.sleep(600)
    """


def test_failure_on_other_host_is_reported_as_on_one_host(hosts: Hosts, script: Script) -> None:
    name = script(FAILING)
    outcomes = []
    for arguments in (["-n", "4"], TWO_BY_TWO):
        job = hosts.run([*arguments, name])
        (code,) = job.wait()
        lines = str(job).splitlines()
        outcomes.append((code, sorted(lines[:4]), lines[4:]))
        for file in Path(hosts.hosts[0].directory).parent.glob("arrived-*"):
            file.unlink()
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][0] == 1
    assert outcomes[1][2][-1] == "ValueError: what rank 2 did not like"
    assert_nothing_left(hosts)


def test_exit_code_of_rank_on_other_host_is_that_of_run(hosts: Hosts, script: Script) -> None:
    (code,) = hosts.run(
        [*TWO_BY_TWO, script("await_all(); sys.exit(7 if rank == 3 else 0)")]
    ).wait()
    assert code == 7


def test_killed_rank_on_other_host_gives_its_signal(hosts: Hosts, script: Script) -> None:
    body = "await_all(); rank == 3 and os.kill(os.getpid(), signal.SIGKILL); time.sleep(600)"
    job = hosts.run([*TWO_BY_TWO, script(body)])
    assert job.wait() == [128 + signal.SIGKILL]
    assert "rank 3 failed first (killed by SIGKILL)" in str(job)
    assert_nothing_left(hosts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_launcher_ends_ranks_of_all_hosts(
    hosts: Hosts, script: Script, tmp_path: Path, number: signal.Signals
) -> None:
    inherited = signal.signal(number, signal.SIG_DFL)
    try:
        job = hosts.run([*TWO_BY_TWO, script("await_all()\ntime.sleep(600)")])
    finally:
        signal.signal(number, inherited)
    until_arrived(tmp_path, 4, job)
    job.processes[0].send_signal(number)
    assert job.wait() == [128 + number]
    if number == signal.SIGINT:
        # Rank 0 may not have seen yet that the last rank has arrived.
        place = r"script.py:\d+, in (<module>|await_all): time.sleep.*\n"
        assert re.fullmatch(f"collective run: interrupted; rank 0 was at {place}", str(job)), job
    assert_nothing_left(hosts)


def test_ctrl_c_before_hosts_have_answered_ends_launch(hosts: Hosts, script: Script) -> None:
    hosts.hosts[1].before = "import time; time.sleep(600)"
    # The host that does not answer does not end, either: the launcher waits for it for so long.
    patience = "from collective.launch.hosts import cluster; cluster._CLOSE_S = 0.5"
    launcher = f"{patience}\nimport runpy; runpy.run_module('collective', run_name='__main__')"
    command = [sys.executable, "-c", launcher, "run", *TWO_BY_TWO, script("arrive()")]
    job = hosts.start([(0, command, {"PATH": f"{hosts.ssh()}{os.pathsep}{os.environ['PATH']}"})])
    until(lambda: pids(hosts, 1, "hosts.agent") and pids(hosts, 0, "hosts.agent"), job)
    job.processes[0].send_signal(signal.SIGINT)
    assert job.wait() == [128 + signal.SIGINT]
    assert str(job) == "collective run: interrupted before the ranks started\n"
    assert_nothing_left(hosts)


FAMILY = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for own_session in (False, True):
        subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=own_session)
    await_all()
    time.sleep(600)
    """


def kill_launcher(hosts: Hosts) -> None:
    os.kill(pids(hosts, 0, "collective run")[0], signal.SIGKILL)


def kill_supervisor(hosts: Hosts) -> None:
    os.kill(pids(hosts, 0, "collective run")[1], signal.SIGKILL)


def kill_ssh(hosts: Hosts) -> None:
    for pid in pids(hosts, 0, "ssh_stand_in"):
        os.kill(pid, signal.SIGKILL)


def kill_agent(hosts: Hosts) -> None:
    os.kill(pids(hosts, 1, "hosts.agent")[-1], signal.SIGKILL)


def kill_parent_of_agent(hosts: Hosts) -> None:
    os.kill(pids(hosts, 1, "hosts.agent")[0], signal.SIGKILL)


@pytest.mark.parametrize(
    "fault", [kill_launcher, kill_supervisor, kill_ssh, kill_agent, kill_parent_of_agent]
)
def test_killed_process_leaves_no_process_on_any_host(
    hosts: Hosts, script: Script, tmp_path: Path, fault: Callable[[Hosts], None]
) -> None:
    job = hosts.run([*TWO_BY_TWO, script(FAMILY)])
    until_arrived(tmp_path, 4, job)
    assert len(pids(hosts, 1, "sleep")) >= 8
    fault(hosts)
    (code,) = job.wait()
    assert code != 0
    if fault not in (kill_launcher, kill_supervisor):
        assert "host host1 is lost: the connection ended" in str(job)
    assert_nothing_left(hosts)


# -- restarts ---------------------------------------------------------------------------------


def test_restart_starts_ranks_of_all_hosts_again(hosts: Hosts, script: Script) -> None:
    body = """
        restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("restart", restart)
        sys.exit(rank == 3 and restart == "0")
        """
    job = hosts.run([*TWO_BY_TWO, "--max-restarts", "1", script(body)])
    text = job.succeed()
    assert text.count("restart 1\n") == 4, text
    assert "collective run: all 4 ranks start again in 0.5 s (restart 1 of 1)" in text
    assert_nothing_left(hosts)


# -- refusals ---------------------------------------------------------------------------------


def refused(job: Job) -> str:
    """Return the text of a launch that was refused before any rank started."""
    assert job.wait() == [2], str(job)
    assert "[0]" not in str(job)
    return str(job)


PROGRAM = "print('started')"


def test_unknown_host_is_named_with_words_of_ssh(hosts: Hosts, script: Script) -> None:
    text = refused(hosts.run(["--hosts", "host0,host9", script(PROGRAM)]))
    assert (
        "hosts: 1 of 2 hosts cannot be used:\n  host host9: ssh ended with exit code 255: " in text
    )
    assert "Could not resolve hostname host9" in text


def test_host_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'a banner' >&2\nexec sleep 600\n")
    ssh.chmod(0o700)
    monkeypatch.setattr(launching, "_START_S", 1.0)
    site = cluster.SharedPaths(str(tmp_path), "", sys.executable, "", [str(ssh)])
    control, handle = os.pipe()
    hosts = [HostSlots("elsewhere.example", 1)]
    try:
        with (
            pytest.raises(RendezvousError) as caught,
            launching.connected(hosts, [], site, control),
        ):
            pass
    finally:
        os.close(control)
        os.close(handle)
    wanted = "host elsewhere.example: it did not answer within 1 s: a banner\nCheck that `ssh "
    assert wanted in str(caught.value)


def test_missing_python_on_host_is_named(hosts: Hosts, script: Script) -> None:
    hosts.hosts[1].variables["PYTHONHOME"] = "/nowhere"
    text = refused(hosts.run(["--hosts", "host0,host1", script(PROGRAM)]))
    assert "host host1: ssh ended with exit code 1" in text


@pytest.mark.parametrize("option", [[], ["--jax"]])
def test_missing_script_on_host_is_named(
    hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest, option: list[str]
) -> None:
    variables = {"PYTHONPATH": request.getfixturevalue("jax_installed")} if option else {}
    path = tmp_path / "host0" / "only.py"
    path.write_text(PROGRAM)
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(path.parent)]
    hosts.hosts[1].before = f"import subprocess; subprocess.run({mount}, check=True)"
    arguments = [*option, "--hosts", "host0,host1", str(path)]
    text = refused(hosts.run(arguments, **variables))
    assert f"hosts: host1: script {str(path)!r}: no such file" in text


def test_different_versions_are_named(hosts: Hosts, script: Script) -> None:
    hosts.hosts[1].before = "import collective; collective.__version__ = '0.0.7'"
    text = refused(hosts.run(["--hosts", "host0,host1", script(PROGRAM)]))
    assert (
        "hosts: the hosts have different versions: host1 has collective 0.0.7, this host "
        f"{collective.__version__}" in text
    )


def test_clocks_apart_are_named(hosts: Hosts, script: Script) -> None:
    body = "import time; now = time.time; time.time = lambda: now() + 3600"
    hosts.hosts[1].before = body
    text = refused(hosts.run(["--hosts", "host0,host1", script(PROGRAM)]))
    assert re.search(
        r"the clocks of the hosts differ: host1 is 3[56]\d\d s ahead of this host", text
    )


# -- reachability -----------------------------------------------------------------------------


def _route(hosts: Hosts, host: int, kind: str, to: str) -> None:
    command = ["ip", "-n", hosts.hosts[host].namespace, "route", "add", kind, f"{to}/32"]
    subprocess.run(command, check=True, timeout=30)


def test_blocked_direction_between_hosts_is_named(make: Make, script: Script) -> None:
    hosts = make(3)
    _route(hosts, 2, "prohibit", "10.77.0.2")
    text = refused(hosts.run(["--hosts", "host0,host1,host2", script(PROGRAM)]))
    # A connection needs packets in both directions, so the other host gets no answer.
    assert "  host2 (eth0, 10.77.0.3) -> host1 (eth0, 10.77.0.2): Permission denied\n" in text
    assert "  host1 (eth0, 10.77.0.2) -> host2 (eth0, 10.77.0.3): no answer within 2 s\n" in text
    assert "host0 (" not in text
    assert "COLLECTIVE_INTERFACE" in text
    assert_nothing_left(hosts)


def test_host_that_is_cut_off_is_named(make: Make, script: Script) -> None:
    hosts = make(2)
    hosts.cut(1)
    job = hosts.run(["--hosts", "host0,host1", script(PROGRAM)])
    text = refused(job)
    assert "host1 (eth0, 10.77.0.2) -> this host (10.77.0.1:" in text
    assert "host0 (eth0, 10.77.0.1) -> host1 (eth0, 10.77.0.2): " in text


def test_host_that_would_listen_on_loopback_is_named(hosts: Hosts, script: Script) -> None:
    arguments = ["--hosts", "host0,host1", script(PROGRAM)]
    text = refused(hosts.run(arguments, COLLECTIVE_INTERFACE="lo"))
    assert "hosts: other hosts cannot reach host0 (lo, 127.0.0.1), host1 (lo, 127.0.0.1)" in text
    assert "hostNetwork" in text


def test_missing_interface_is_named_with_its_host(hosts: Hosts, script: Script) -> None:
    rename = ["ip", "-n", hosts.hosts[1].namespace, "link", "add", "eth7", "type", "bridge"]
    subprocess.run(rename, check=True, timeout=30)
    arguments = ["--hosts", "host0,host1", script(PROGRAM)]
    text = refused(hosts.run(arguments, where=1, COLLECTIVE_INTERFACE="eth7"))
    assert "interface: 'eth7'; it is down" in text


def test_address_that_another_host_has_too_is_named(hosts: Hosts, script: Script) -> None:
    # Such an address has the bridge of containers, which is the same on every host.
    for host in hosts.hosts:
        for command in (
            ["link", "add", "docker0", "type", "bridge"],
            ["addr", "add", "172.17.0.1/16", "dev", "docker0"],
            ["link", "set", "docker0", "up"],
        ):
            subprocess.run(["ip", "-n", host.namespace, *command], check=True, timeout=30)
    arguments = ["--hosts", "host0,host1", script(PROGRAM)]
    text = refused(hosts.run(arguments, COLLECTIVE_INTERFACE="docker0"))
    assert re.search(r"host0 \(docker0, 172.17.0.1\) -> host1 \(docker0, 172.17.0.1\): ", text)


def doctor(hosts: Hosts, *arguments: str) -> Job:
    path = f"{hosts.ssh()}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "collective", "doctor", *arguments]
    return hosts.start([(0, command, {"PATH": path})])


def test_doctor_shows_hosts_that_reach_each_other(hosts: Hosts) -> None:
    text = doctor(hosts, "--hosts", "host0,host1").succeed()
    assert text.startswith("Hosts\n  host0  eth0 10.77.0.1; Python 3.")
    assert "\n  host1  eth0 10.77.0.2; Python 3." in text
    assert text.endswith("\n\nEach of the 2 hosts reaches all others.\n")
    assert_nothing_left(hosts)


def test_doctor_names_hosts_that_do_not_reach_each_other(hosts: Hosts) -> None:
    hosts.cut(1)
    job = doctor(hosts, "--hosts", "host0,host1", "--json")
    assert job.wait() == [1]
    report = json.loads(str(job))
    assert report["exit_code"] == 1
    assert "  host0 (eth0, 10.77.0.1) -> host1 (eth0, 10.77.0.2): " in report["error"]
    assert_nothing_left(hosts)


# -- lost hosts -------------------------------------------------------------------------------


def reports(job: Job) -> list[dict[str, Any]]:
    """Return what the ranks have printed, in the order of the output."""
    lines = [line.partition(" SAID ")[2] for line in str(job).splitlines(keepends=True)]
    return [ast.literal_eval(line) for line in lines if line.endswith("\n")]


def begun(job: Job, origin: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the ranks that have begun a generation, once all its members have."""

    def members() -> list[dict[str, Any]]:
        return [report for report in reports(job) if report.get("origin") == origin]

    until(lambda: len(members()) == len(origin), job)
    return members()


def test_host_of_rank_0_dies_and_others_train_on(make: Make, tmp_path: Path) -> None:
    hosts = make(3)
    arguments = ["--hosts", "host1:2,host2:2", "--min-ranks", "2", PROGRAMS, "train"]
    job = hosts.run(arguments)
    begun(job, (0, 1, 2, 3))
    lost_at = time.monotonic()
    hosts.end(1)
    survivors = begun(job, (2, 3))
    assert max(report["at"] for report in survivors) - lost_at < PROMISED_S + NOISE_S
    assert min(report["step"] for report in survivors) > 0
    (tmp_path / "stop").touch()
    text = job.succeed()
    lost = "host host1 is lost: the connection ended"
    assert f"rank 0 is lost ({lost}); 3 of 4 ranks are left, and 2 are enough." in text
    assert f"collective run: ranks 0, 1 were lost ({lost})" in text
    assert_nothing_left(hosts)


def test_example_goes_on_when_a_host_dies(make: Make) -> None:
    hosts = make(3)
    example = str(ROOT / "examples" / "several_hosts.py")
    where = ["--hosts", "host1:1,host2:1", "--min-ranks", "1"]
    job = hosts.run([*where, example, "--steps", "5000"])
    until(lambda: "step 0, size 2, over tcp" in str(job), job)
    hosts.end(1)
    text = job.succeed()
    assert "5000 steps, size 1 at the end: loss 0.0" in text
    assert_nothing_left(hosts)


def test_host_dies_before_its_ranks_meet_and_others_meet_without_them(make: Make) -> None:
    hosts = make(3)
    arguments = ["--hosts", "host1:1,host2:2", "--min-ranks", "2", PROGRAMS, "without_rank_0"]
    job = hosts.run(arguments)
    until(lambda: reports(job), job)
    hosts.end(1)
    job.succeed()
    met = sorted((report for report in reports(job) if "rank" in report), key=str)
    assert met == [{"rank": n, "size": 2, "local": (n, 2)} for n in range(2)]
    assert_nothing_left(hosts)


def test_spare_host_replaces_host_that_dies(make: Make, tmp_path: Path) -> None:
    hosts = make(4)
    where = ["--hosts", "host1:2,host2:2", "--spares", "host3:2", "--min-ranks", "2"]
    job = hosts.run([*where, PROGRAMS, "train"])
    begun(job, (0, 1, 2, 3))
    assert hosts.on(3)  # the agent waits there
    lost_at = time.monotonic()
    hosts.end(1)
    begun(job, (2, 3))
    members = begun(job, (2, 3, 4, 5))
    assert max(report["at"] for report in members) - lost_at < 10.0 + NOISE_S
    assert sorted(report["host"] for report in members) == ["host2", "host2", "host3", "host3"]
    assert len({report["step"] for report in members}) == 1
    (tmp_path / "stop").touch()
    assert "A new process will join them." in job.succeed()
    assert_nothing_left(hosts)


def test_lost_rank_is_replaced_on_its_host(make: Make, tmp_path: Path) -> None:
    hosts = make(3)
    where = ["--hosts", "host1:2,host2:2", "--spares", "host0:2", "--min-ranks", "3"]
    job = hosts.run([*where, PROGRAMS, "train"])
    begun(job, (0, 1, 2, 3))
    os.kill(pids(hosts, 1, "train")[0], signal.SIGKILL)
    until(lambda: [r for r in reports(job) if 4 in r.get("origin", ())], job)
    (origin,) = {report["origin"] for report in reports(job) if 4 in report.get("origin", ())}
    members = begun(job, origin)
    assert sorted(report["host"] for report in members) == ["host1", "host1", "host2", "host2"]
    (tmp_path / "stop").touch()
    job.succeed()
    assert_nothing_left(hosts)


def test_host_that_goes_down_loses_no_step(make: Make, tmp_path: Path) -> None:
    hosts = make(4)
    where = ["--hosts", "host1:2,host2:2", "--spares", "host3:2", "--min-ranks", "2"]
    job = hosts.run([*where, PROGRAMS, "train"])
    begun(job, (0, 1, 2, 3))
    for pid in hosts.on(1):  # as a system does that shuts down
        os.kill(pid, signal.SIGTERM)
    begun(job, (2, 3, 4, 5))
    until(lambda: not hosts.on(1), job)
    (tmp_path / "stop").touch()
    text = job.succeed()
    assert "collective run: host host1 goes down; its ranks leave" in text
    for rank in (0, 1):
        assert f"rank {rank} is lost (exit code 143)" in text
    left = [report["step"] for report in reports(job) if "leaves" in report]
    assert len(left) == 2
    following = begun(job, (2, 3))
    assert min(report["step"] for report in following) >= max(left)
    assert_nothing_left(hosts)


def silence_ssh(hosts: Hosts, host: int) -> None:
    """Stop the stand-in for ssh to a host: it crosses no network that could be cut."""
    (ssh,) = pids(hosts, 0, "ssh_stand_in", f" -- host{host} ")
    os.kill(ssh, signal.SIGSTOP)


# The first host is that of rank 0, which tells the ranks of losses as long as it lives.
@pytest.mark.parametrize(
    ("silent", "where", "survivors"),
    [(1, "host1:1,host2:2", (1, 2)), (2, "host1:2,host2:1", (0, 1))],
)
def test_silent_host_is_left_behind_and_its_ranks_are_killed(
    make: Make, tmp_path: Path, silent: int, where: str, survivors: tuple[int, ...]
) -> None:
    hosts = make(3)
    hosts.hosts[
        silent
    ].before = (
        "from collective.launch.hosts import agent; agent._SILENCE_S = 3.0; exit(agent.main())"
    )
    # The ranks must be the processes that the agents start: the launcher announces their numbers.
    arguments = ["--hosts", where, "--min-ranks", "2", PROGRAMS, "train"]
    job = hosts.run(arguments)
    begun(job, (0, 1, 2))
    silence_ssh(hosts, silent)
    silent_at = time.monotonic()
    hosts.cut(silent)
    members = begun(job, survivors)
    assert max(report["at"] for report in members) - silent_at < 3 * PROMISED_S
    until(lambda: not hosts.on(silent), job)
    (tmp_path / "stop").touch()
    assert f"(host host{silent} is lost: it is silent)" in job.succeed()
    assert_nothing_left(hosts)


def test_busy_host_is_not_lost(hosts: Hosts, script: Script, tmp_path: Path) -> None:
    body = """
        await_all()
        while not os.path.exists("stop"):
            time.sleep(0.01)
        """
    job = hosts.run([*TWO_BY_TWO, "--min-ranks", "2", script(body)])
    until_arrived(tmp_path, 4, job)
    agents = pids(hosts, 1, "hosts.agent")
    for pid in agents:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PROMISED_S)  # a host that is cut off is lost earlier
    for pid in agents:
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "stop").touch()
    assert job.succeed() == ""


def test_host_lost_with_too_few_left_ends_run(hosts: Hosts, script: Script, tmp_path: Path) -> None:
    job = hosts.run([*TWO_BY_TWO, script("await_all()\ntime.sleep(600)")])
    until_arrived(tmp_path, 4, job)
    hosts.end(1)
    assert job.wait() == [128 + signal.SIGKILL]
    assert "rank 2 failed first (host host1 is lost: the connection ended)" in str(job)
    assert_nothing_left(hosts)


def test_restart_uses_spare_host_in_place_of_lost_one(make: Make, script: Script) -> None:
    hosts = make(3)
    body = """
        import socket
        print("at", socket.gethostname(), "restart", os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            arrive()
            time.sleep(600)
        """
    where = ["--hosts", "host0:1,host1:2", "--spares", "host2:2", "--max-restarts", "1"]
    job = hosts.run([*where, "--min-ranks", "2", script(body)])
    until_arrived(hosts.hosts[0].directory.parent, 3, job)
    hosts.end(1)
    os.kill(pids(hosts, 0, "script.py")[-1], signal.SIGKILL)
    text = job.succeed()
    assert re.findall(r"\[(\d)\] at (\S+) restart 1", "\n".join(sorted(text.splitlines()))) == [
        ("0", "host0"), ("1", "host2"), ("2", "host2"),
    ]  # fmt: skip
