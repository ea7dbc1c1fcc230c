"""Failures of MPI, of a peer or of a launch, and how the processes end."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from collective.backends.mpi import MpiBackend
from collective.backends.mpi import library as mpi_library
from collective.deadline import Deadline
from collective.errors import BackendUnavailableError
from collective.testing.ranks import Opening
from tests.support.mpi_launches import VENDORS, by_vendor, launch_of, mpirun, needs, run_alone

# Each line is one write, because the ranks share one output.
_PRELUDE = """
import collective, numpy as np, os, signal, sys, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def _script(text: str) -> str:
    return _PRELUDE + textwrap.dedent(text)


# -- orderly ends ----------------------------------------------------------------------------


@by_vendor
@pytest.mark.parametrize("how", ["with", "close", "neither"])
def test_program_exits(vendor: str, how: str) -> None:
    script = _script(f"""
        comm = collective.init("mpi")
        if {how!r} == "with":
            with comm:
                total = comm.all_reduce(np.array([comm.rank]))
        else:
            total = comm.all_reduce(np.array([comm.rank]))
        if {how!r} == "close":
            comm.close()
        say("total", total[0])
    """)
    result = mpirun(vendor, 3, script)
    assert result.stdout.count("total 3") == 3
    assert "collective" not in result.stdout


@by_vendor
@pytest.mark.parametrize("owner", ["library", "program"])
def test_program_that_drops_communicators_exits(vendor: str, owner: str) -> None:
    script = _script(f"""
        if {owner!r} != "library":
            from mpi4py import MPI
        from collective.backends.mpi import MpiBackend
        from collective.start.mpi_world import world_of
        from collective.start.connecting import connect
        for turn in range(3):
            comm = connect(world_of(None), MpiBackend, timeout=20.0)
            assert comm.all_reduce(np.ones(1)) == 3
            time.sleep(0.05 * comm.rank)
        say("fine")
    """)
    result = mpirun(vendor, 3, script)
    assert result.stdout == 3 * "fine\n"


@by_vendor
def test_program_with_background_calls_exits(vendor: str) -> None:
    script = _script("""
        comm = collective.init("mpi")
        if comm.rank == 0:
            work = comm.recv(None, 1, async_op=True)
        comm.barrier()
        say("over")
    """)
    assert mpirun(vendor, 2, script).stdout.count("over") == 2


@by_vendor
def test_mpi_state_of_program_is_unchanged(vendor: str) -> None:
    script = _script("""
        from mpi4py import MPI
        half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, -MPI.COMM_WORLD.rank)
        MPI.COMM_WORLD.Set_name("mine")
        before = half.Get_errhandler()
        request = half.Irecv(np.zeros(1), tag=MPI.ANY_TAG)
        with collective.init(comm=half) as comm:
            assert comm.backend == "mpi"
            assert (comm.rank, comm.size) == (half.rank, half.size) == (half.rank, 2)
            assert comm.all_reduce(np.ones(1)) == 2
            comm.sendrecv(np.ones(2), 1 - comm.rank, 1 - comm.rank)
        assert not request.Test()  # no message of ours meets one of the program's
        half.Barrier()
        half.Send(np.ones(1), 1 - half.rank)
        request.Wait()
        assert half.Get_errhandler() == before
        assert MPI.COMM_WORLD.Get_name() == "mine"
        assert not MPI.Is_finalized()
        half.Free()
        MPI.Finalize()
        say("fine")
    """)
    assert mpirun(vendor, 4, script).stdout.count("fine") == 4


@by_vendor
def test_closed_communicator_makes_no_mpi_calls(vendor: str) -> None:
    # Such a call could come after the program's own MPI_Finalize.
    script = _script("""
        from mpi4py import MPI
        from collective.backends.mpi import MpiStore
        inside, turns, receive = 0, 0, MpiStore._receive
        def slowly(store):
            global inside, turns
            inside, turns = inside + 1, turns + 1
            time.sleep(0.05)
            receive(store)
            inside -= 1
        MpiStore._receive = slowly
        with collective.init(comm=MPI.COMM_WORLD) as comm:
            comm.barrier()
        before = turns
        assert before and not inside, (before, inside)
        time.sleep(0.2)
        assert turns == before
        MPI.Finalize()
        say("fine")
    """)
    assert mpirun(vendor, 2, script).stdout.count("fine") == 2


@by_vendor
def test_world_of_one_rank_needs_no_mpiexec(vendor: str) -> None:
    script = _script("""
        with collective.init("mpi") as comm:
            assert comm.size == 1
            assert comm.all_reduce(np.arange(3.0), op="avg").tolist() == [0, 1, 2]
            assert comm.all_reduce(np.array([2, 0]), op="land").tolist() == [1, 0]
            assert comm.sendrecv(np.ones(2), 0, 0).tolist() == [1, 1]
        print("fine")
    """)
    assert run_alone(launch_of(vendor).python, script).stdout == "fine\n"


@by_vendor
def test_init_with_unconnected_mpi_world_is_refused(vendor: str) -> None:
    script = _script("""
        from mpi4py import MPI
        try:
            collective.init(comm=MPI.COMM_WORLD)
        except collective.BackendUnavailableError as error:
            print(error)
        # Who names it means it.
        print(collective.init(comm=MPI.COMM_SELF).size)
    """)
    # The environment of one of two ranks that `torchrun` starts.
    written = run_alone(launch_of(vendor).python, script, RANK="1", WORLD_SIZE="2").stdout
    assert written.startswith("mpi: MPI's world has size 1, but the launcher 'torchrun' started 2")
    assert written.endswith("mpiexec -n 2.\n1\n")


# -- ends after a failure ---------------------------------------------------------------------


@by_vendor
def test_exception_on_one_rank_ends_job(vendor: str) -> None:
    script = _script("""
        comm = collective.init("mpi")
        if comm.rank == 1:
            raise ZeroDivisionError("by nobody")
        comm.barrier()
    """)
    result = mpirun(vendor, 2, script, check=False)
    assert result.returncode != 0
    assert "by nobody" in result.stdout


# Rank 0 announces the call and then does not take part in MPI's operation. Rank 1 creates the file
# when it enters the operation.
_STOPS_INSIDE = """
    from collective.launch import rank_line
    {prelude}
    comm = collective.init("mpi", timeout={timeout})
    inside, arrive = os.environ["INSIDE"], comm.inner.transport._arrive
    def enter(*arguments):
        how = arrive(*arguments)
        open(inside, "x").close()
        return how
    def stop(*arguments):
        arrive(*arguments)
        while not os.path.exists(inside):
            time.sleep(0.01)
        {act}
    comm.barrier()
    comm.inner.transport._arrive = enter if comm.rank else stop
    try:
        comm.broadcast(np.ones(1000))
    except collective.CollectiveError as error:
        say("heard", type(error).__name__, error)
        os._exit(0)
"""
_DIE = "os.kill(os.getpid(), signal.SIGKILL)"


def _output(vendor: str, script: str, *arguments: str, **environment: str) -> str:
    return mpirun(vendor, 2, script, arguments=arguments, check=False, **environment).stdout


@needs("mpich")
def test_peer_death_inside_operation_ends_process(tmp_path: Path) -> None:
    # The rank leaves the process group, as ranks of a pool do: else mpiexec would end the job at
    # once.
    prelude = "rank_line.leave_process_group()"
    script = _script(_STOPS_INSIDE.format(prelude=prelude, timeout=60.0, act=_DIE))
    output = _output("mpich", script, "-disable-auto-cleanup", INSIDE=str(tmp_path / "inside"))
    assert "collective: PeerLostError: broadcast(float64[1000], root=0): rank 0" in output
    assert "nobody can call it back: the process ends here, with exit code 1" in output
    assert "heard" not in output


@needs("openmpi")
def test_peer_death_with_ulfm_raises_peer_lost(tmp_path: Path) -> None:
    script = _script(_STOPS_INSIDE.format(prelude="", timeout=60.0, act=_DIE))
    output = _output("openmpi", script, "--with-ft", "ulfm", INSIDE=str(tmp_path / "inside"))
    assert re.search(r"heard PeerLostError broadcast\(.*rank 0", output)


@needs("openmpi")
@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
def test_send_to_departed_rank_returns(closes: bool, tmp_path: Path) -> None:
    # The message is so long that MPI sends it only when the receiver asks for it, as with parts of
    # an all_reduce. MPI returns that the communicator was revoked, or that the message is sent. A
    # file reports the end of the call, because mpiexec may drop output.
    over = tmp_path / "over"
    script = _script(f"""
        inside, closed, over = {[str(tmp_path / name) for name in ("inside", "closed", "over")]!r}
        def wait_for(file):
            while not os.path.exists(file) and time.monotonic() < end:
                time.sleep(0.01)
        end = time.monotonic() + 60
        comm = collective.init("mpi")
        if comm.rank == 1:
            from mpi4py.MPI import Exception as MpiError
            comm.barrier()
            open(inside, "x").close()
            if {closes}:
                wait_for(closed)
            try:
                late = collective.deadline.Deadline(60)
                comm.inner.transport._move(0, "a send", late, "Send", np.ones(1 << 20), 0)
            except MpiError:
                pass
            open(over, "x").close()
            os._exit(0)
        try:
            comm.barrier()
            if comm.rank == 2:
                wait_for(inside)
                {_DIE}
            comm.barrier()
        except collective.PeerLostError:
            if {closes}:
                comm.close()
                del comm
                open(closed, "x").close()
            wait_for(over)
    """)
    result = mpirun("openmpi", 3, script, arguments=("--with-ft", "ulfm"), check=False)
    assert over.exists(), result.stdout


@pytest.mark.whole
@needs("openmpi")
def test_survivors_shrink_with_open_mpi() -> None:
    script = _script(f"""
        comm = collective.init("mpi")
        first = comm.rank
        for victims in ((0, 1), (2,)):
            try:
                comm.barrier()
            except collective.PeerLostError:
                pass  # one that came out of it sooner has died before the others were out
            if first in victims:
                {_DIE}
            try:
                while True:
                    comm.all_reduce(np.ones(1))
            except collective.PeerLostError:
                comm = comm.shrink()
            total = comm.all_reduce(np.array([2**first]))[0]
            origin = comm.membership.origin
            say("rank", first, "is", comm.rank, "of", comm.size, origin, "sum", total)
    """)
    result = mpirun("openmpi", 5, script, arguments=("--with-ft", "ulfm"), check=False)
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("rank "))
    assert lines == [
        "rank 2 is 0 of 3 (2, 3, 4) sum 28",
        "rank 3 is 0 of 2 (3, 4) sum 24",
        "rank 3 is 1 of 3 (2, 3, 4) sum 28",
        "rank 4 is 1 of 2 (3, 4) sum 24",
        "rank 4 is 2 of 3 (2, 3, 4) sum 28",
    ], result.stdout
    assert "Traceback" not in result.stdout


@needs("openmpi")
def test_past_generations_leave_no_users_or_threads() -> None:
    script = _script("""
        import gc, threading
        from collective.backends.mpi import library, watchdog
        comm = collective.init("mpi")
        def kept():
            gc.collect()
            users, watched = list(library._users), list(watchdog._watched)
            return len(users), len(watched), len(library._unfinished), threading.active_count()
        def next_one(comm):
            following = comm.shrink()
            following.all_reduce(np.ones(1))
            return following
        comm = next_one(comm)
        before = kept()
        for _ in range(5):
            comm = next_one(comm)
        def grown():
            return any(now > then for now, then in zip(kept(), before))
        # Threads of the last generation are about to end; "before" may hold one of those, too.
        deadline = time.monotonic() + 20
        while grown() and time.monotonic() < deadline:
            time.sleep(0.01)
        say("rank", comm.rank, "before", before, "after", kept(), not grown())
    """)
    output = mpirun("openmpi", 2, script, arguments=("--with-ft", "ulfm")).stdout
    assert output.count("True") == 2, output


@by_vendor
def test_deadline_inside_operation_ends_process(vendor: str, tmp_path: Path) -> None:
    script = _script(_STOPS_INSIDE.format(prelude="", timeout=1.0, act="time.sleep(100)"))
    output = _output(vendor, script, INSIDE=str(tmp_path / "inside"))
    assert "collective: CollectiveTimeoutError: broadcast(float64[1000]" in output


@by_vendor
def test_finalize_of_program_does_not_wait_for_dead_rank(vendor: str) -> None:
    if vendor == "openmpi":
        prelude, arguments = "", ("--with-ft", "ulfm")
    else:
        prelude, arguments = "rank_line.leave_process_group()", ("-disable-auto-cleanup",)
    script = _script(f"""
        from collective.launch import rank_line
        {prelude}
        from mpi4py import MPI
        comm = collective.init("mpi", comm=MPI.COMM_WORLD)
        try:
            comm.barrier()
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()
        except collective.PeerLostError:
            say("heard")
    """)
    output = _output(vendor, script, *arguments)
    assert "heard" in output
    assert "the job is aborted instead" in output


# Rank 0 waits for this file, so that it stays alive and silent as long as the other rank needs.
_UNTIL_HEARD = """
heard = {heard!r}
def until_heard():
    while not os.path.exists(heard):
        time.sleep(0.01)
    os._exit(0)
"""


@by_vendor
def test_rank_missing_at_store_raises_rendezvous_error(vendor: str, tmp_path: Path) -> None:
    script = (
        _UNTIL_HEARD.format(heard=str(tmp_path / "heard"))
        + """
from mpi4py import MPI
from collective.start.mpi_world import world_of
if MPI.COMM_WORLD.rank == 0:
    until_heard()
try:
    world_of(MPI.COMM_WORLD, timeout=0.5)
except collective.RendezvousError as error:
    say(error)
open(heard, "w").close()
os._exit(0)
"""
    )
    output = _output(vendor, _script(script))
    assert "after 0.5 s not all of the 2 ranks of the MPI communicator" in output


@by_vendor
def test_process_without_init_raises_rendezvous_error(vendor: str, tmp_path: Path) -> None:
    script = (
        _UNTIL_HEARD.format(heard=str(tmp_path / "heard"))
        + """
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
    until_heard()
try:
    collective.init("mpi", start_timeout=1.5)
    say("came through")
finally:
    open(heard, "w").close()
"""
    )
    output = _output(vendor, _script(script))
    assert "RendezvousError" in output
    assert "came through" not in output


# -- unusable libraries -------------------------------------------------------------------------


def test_missing_mpi4py_raises_backend_unavailable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    world = Opening("mpi", 1, "none", str(tmp_path / "meet"), 5.0).world(0)
    with pytest.raises(BackendUnavailableError, match=r"pip install .*\[mpi\]"):
        MpiBackend.connect(world, Deadline(5.0))


_LEVEL = "import mpi4py\nmpi4py.rc.thread_level = 'funneled'\nfrom mpi4py import MPI\n"
# Code that runs before a program asks for a world of one rank, its environment variables, and
# parts of the expected error. HERE is a folder with a broken library and with the metadata of two
# installed libraries.
_UNFIT: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "missing": (
        "",
        {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        ("mpi4py cannot load an MPI library", "/nowhere/libmpi.so", "pip install mpich"),
    ),
    "broken": (
        "",
        {"MPI4PY_LIBMPI": "HERE/libmpi.so"},
        ("mpi4py cannot load an MPI library", "HERE/libmpi.so"),
    ),
    "two libraries installed": (
        "import sys\nsys.path.insert(0, 'HERE')\n",
        {},
        ("this environment has several MPI", "mpich 9.9 and openmpi 9.9", "MPI4PY_LIBMPI"),
    ),
    "thread level too low": (
        _LEVEL,
        {},
        ("MPI's thread level is 'funneled'", "MPI.Init_thread(MPI.THREAD_MULTIPLE)"),
    ),
    "finalised": ("from mpi4py import MPI\nMPI.Finalize()\n", {}, ("MPI has been finalised",)),
}


@by_vendor
@pytest.mark.parametrize("case", _UNFIT)
def test_unusable_library_raises_backend_unavailable(
    vendor: str, case: str, tmp_path: Path
) -> None:
    (tmp_path / "libmpi.so").write_bytes(b"\x7fELF and then nothing")
    for name in VENDORS:
        info = tmp_path / f"{name}-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    before, variables, words = _UNFIT[case]
    script = before.replace("HERE", str(tmp_path)) + _script("""
        try:
            collective.init("mpi")
        except collective.CollectiveError as error:
            print(type(error).__name__, error)
    """)
    variables = {name: value.replace("HERE", str(tmp_path)) for name, value in variables.items()}
    output = run_alone(launch_of(vendor).python, script, **variables).stdout
    assert output.startswith(f"BackendUnavailableError mpi: {words[0]}")
    for word in words:
        assert word.replace("HERE", str(tmp_path)) in output


@pytest.mark.whole
@needs(*VENDORS)
@pytest.mark.parametrize(("launcher", "library"), [VENDORS, VENDORS[::-1]])
def test_mpiexec_of_another_library_is_refused(launcher: str, library: str) -> None:
    script = _script("""
        try:
            collective.init("mpi")
        except collective.BackendUnavailableError as error:
            say(error)
            os._exit(0)
    """)
    python = launch_of(library).python
    output = mpirun(launcher, 2, script, python=python, check=False).stdout
    name = {"mpich": "MPICH", "openmpi": "Open MPI"}[library]
    assert "rank 0 of 2 (launcher" in output
    assert f"not started by the mpiexec of its MPI library, {name}" in output
    assert str(Path(python).parent / "mpiexec") in output


def test_wheels_lists_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"mpich": "4.3.0", "impi-rt": "2021.16"}

    def version(name: str) -> Any:
        if name not in versions:
            raise mpi_library.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(mpi_library.metadata, "version", version)
    assert mpi_library.wheels() == ["mpich 4.3.0", "impi-rt 2021.16"]
