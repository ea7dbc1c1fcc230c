"""init(), the current communicator, and how the end of a program reaches its peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import numpy as np
import pytest

import collective
from collective.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    ConfigError,
    InvalidArgumentError,
    PeerFailedError,
    PeerLostError,
    UnsupportedError,
)
from collective.start import session
from collective.testing import run_ranks
from tests.start.test_world import world as world_of
from tests.support.interpreter import run_python
from tests.support.launches import ROOT, launches  # noqa: F401
from tests.support.selection import in_whole


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch):
    """Run in a directory without configuration files and without a current communicator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_of_process", None)


def _python(body: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", textwrap.dedent(body), env={"PATH": "/usr/bin:/bin"})


# -- one rank ------------------------------------------------------------------------------


def test_init_without_settings_gives_one_rank():
    with collective.init() as comm:
        assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)
        assert comm.backend == "threads"
        x = np.arange(3.0)
        assert comm.all_reduce(x).tolist() == [0, 1, 2]
        assert comm.gather(x).tolist() == [0, 1, 2]
        assert comm.broadcast_object({"a": 1}) == {"a": 1}
        assert "rank 0 of 1 over threads" in repr(comm)


@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        ("threads", "threads"),
        ("shm", "shm"),
        ("auto", "threads"),
        ("cpu:shm,cuda:nccl", "nccl"),
        ("cpu:shm,cuda:shm", "shm"),
        ("cpu:auto", "threads"),
    ],
)
def test_init_with_one_rank_works_over_any_transport(backend, chosen):
    with collective.init(backend) as comm:
        assert comm.backend == chosen
        assert comm.all_reduce(np.ones(100_000)).sum() == 100_000
        assert comm.split(0).size == 1


def test_module_level_calls_use_the_communicator_of_init():
    collective.init()  # No variable keeps the communicator alive.
    assert (collective.rank(), collective.size()) == (0, 1)
    assert collective.all_reduce(np.ones(2)).tolist() == [1, 1]
    assert collective.current().rank == 0
    collective.current().close()


def test_current_returns_communicator_of_last_init():
    first, second = collective.init(), collective.init("shm")
    assert collective.current() is second
    second.close()
    with pytest.raises(CommunicatorClosedError, match=r"collective\.init"):
        collective.rank()
    first.close()


@pytest.mark.parametrize("call", ["rank", "size", "barrier", "current"])
def test_module_level_calls_before_init_name_the_remedy(call):
    with pytest.raises(CommunicatorClosedError, match=r"call collective\.init\(\) first"):
        getattr(collective, call)()


def test_call_after_abort_and_close_names_the_call():
    comm = collective.init()
    comm.abort("enough")
    with pytest.raises(CommunicatorAbortedError, match="enough"):
        comm.all_reduce(np.ones(2))
    comm.close()
    with pytest.raises(CommunicatorClosedError, match=r"^all_reduce: this communicator is closed"):
        comm.all_reduce(np.ones(2))


# -- the choice ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({"backend": "smh"}, BackendNotFoundError, "Did you mean 'shm'"),
        ({"backend": "SHM"}, BackendNotFoundError, "Did you mean 'shm'"),
        ({"backend": "cuda:nccl"}, ConfigError, "cpu:shm"),
        ({"time_out": 3}, ConfigError, "timeout"),
        ({"rank": 0, "size": 2}, ConfigError, "store"),
        ({"rank": 5, "size": 2}, ConfigError, "rank"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_init_with_wrong_settings_raises_and_sets_no_communicator(arguments, error, expected):
    with pytest.raises(error, match=expected):
        collective.init(**arguments)
    with pytest.raises(CommunicatorClosedError):
        collective.current()


# -- an MPI.Comm from the program ----------------------------------------------------------


class Pretended(types.ModuleType):
    """Stand-in for mpi4py.MPI, with the names that init() uses before it starts a transport."""

    class Intracomm:
        pass

    class Intercomm:
        pass

    COMM_NULL = Intracomm()


@pytest.fixture
def mpi4py(monkeypatch):
    module = Pretended("mpi4py.MPI")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    return module


@pytest.mark.parametrize("comm", [0, "world", object()], ids=["number", "text", "object"])
def test_init_with_comm_not_from_mpi4py_raises_invalid_argument(comm, mpi4py):
    with pytest.raises(InvalidArgumentError, match=r"comm=.*MPI\.Intracomm"):
        collective.init(comm=comm)


def test_init_with_comm_does_not_import_mpi4py(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(InvalidArgumentError, match=r"MPI\.Intracomm"):
        collective.init(comm=Pretended.Intracomm())
    assert "mpi4py.MPI" not in sys.modules


def test_init_with_intercommunicator_or_null_raises(mpi4py):
    for comm in (mpi4py.Intercomm(), mpi4py.COMM_NULL):
        with pytest.raises(InvalidArgumentError, match="that this process is in"):
            collective.init(comm=comm)


def test_init_with_comm_and_rank_settings_raises(mpi4py, tmp_path):
    with pytest.raises(InvalidArgumentError, match="together with rank, size, store"):
        collective.init(comm=mpi4py.Intracomm(), rank=0, size=1, store=tmp_path)
    with pytest.raises(ConfigError, match="timeout"):
        collective.init(comm=mpi4py.Intracomm(), time_out=3)


def test_init_with_comm_in_thread_ranks_raises_unsupported(mpi4py):
    session.thread_world(world_of())
    try:
        with pytest.raises(UnsupportedError, match="mpiexec"):
            collective.init(comm=mpi4py.Intracomm())
    finally:
        session.thread_world(None)


# -- ranks that are threads ----------------------------------------------------------------


def test_current_is_separate_for_each_thread_rank():
    def program(comm):
        collective.barrier()
        total = int(collective.all_reduce(np.array([collective.rank()]))[0])
        return collective.current() is comm, collective.rank(), collective.size(), total

    assert run_ranks(3, program) == [(True, rank, 3, 3) for rank in range(3)]


def test_module_level_calls_copy_names_and_docstrings():
    for name in ("all_reduce", "empty", "split", "send_object"):
        function, method = getattr(collective, name), getattr(collective.Communicator, name)
        assert function.__doc__ == method.__doc__
        assert function.__name__ == name


# -- the end of a program ------------------------------------------------------------------


def test_uncaught_exception_without_with_block_reaches_peers(launches):  # noqa: F811
    script = launches.script(
        """
        import collective, numpy as np
        comm = collective.init()
        try:
            comm.barrier()
            if comm.rank == 1:
                raise ValueError("of rank one")
            comm.all_reduce(np.ones(3))
        except collective.PeerFailedError as error:
            print("told:", error.rank, error.traceback.splitlines()[-1], flush=True)
        """
    )
    done = launches.run("-n", "2", script)
    assert done.returncode == 1
    assert "told: 1 ValueError: of rank one" in done.stdout


def test_exit_without_close_raises_peer_lost_on_peers(launches):  # noqa: F811
    script = launches.script(
        """
        import collective
        comm = collective.init()
        part = comm.dup()
        comm.barrier()
        if comm.rank == 0:
            for it in (part, comm):
                try:
                    it.barrier()
                except collective.PeerLostError as error:
                    print("told:", error.ranks, "closed" in str(error), flush=True)
        """
    )
    done = launches.run("-n", "2", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("told: (1,) True") == 2


# Until rank 0 has heard of the end of rank 1, a thread of rank 1 keeps its process from ending.
LINGERING = """
import collective, threading
from concurrent.futures import ThreadPoolExecutor
def linger():
    while not os.path.exists("told"):
        time.sleep(0.01)
def fail():
    threading.main_thread().join()
    raise ValueError("of a thread")
def end():
    {end}
comm = collective.init(timeout=600)
if rank == 1:
    threading.Thread(target={thread}).start()
    end()
else:
    try:
        comm.barrier()
    except collective.CommunicatorAbortedError as error:
        print("told:", type(error).__name__, str(error).splitlines()[-1], flush=True)
    open("told", "w").close()
"""


@pytest.mark.parametrize(
    ("thread", "end", "last"),
    [
        ("linger", 'raise ValueError("bad")', "ValueError: bad"),
        ("linger", "raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("linger", "sys.exit(3)", "SystemExit: 3"),
        ("linger", "ThreadPoolExecutor().submit(linger); sys.exit('why')", "SystemExit: why"),
        ("fail", "threading.Thread(target=linger).start()", "ValueError: of a thread"),
    ],
)
def test_failure_is_told_at_once_though_threads_run_on(launches, thread, end, last):  # noqa: F811
    script = launches.script(LINGERING.format(thread=thread, end=end))
    done = launches.run("-n", "2", "--backend", "shm", script)
    assert done.stdout == f"[0] told: PeerFailedError {last}\n", done.stderr


def test_launcher_ends_run_at_once_though_threads_of_failed_rank_run_on(launches):  # noqa: F811
    script = launches.script("""
        import collective, threading
        with collective.init() as comm:
            comm.barrier()
            if rank == 1:
                threading.Thread(target=time.sleep, args=(600,)).start()
                sys.exit(3)
        """)
    done = launches.run("-n", "2", "--backend", "shm", script)
    assert done.returncode == 3
    assert "collective run: rank 1 failed first (exit code 3); " in done.stderr
    launches.assert_nothing_left()


def test_sys_exit_that_was_caught_is_no_failure(launches):  # noqa: F811
    end = "try: sys.exit(3)\n    except SystemExit: pass"
    script = launches.script(LINGERING.format(thread="int", end=end))
    done = launches.run("-n", "2", "--backend", "shm", script)
    assert done.stdout.startswith("[0] told: PeerLostError "), done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("mine"), [("failed", ())]),
        # The failure keeps its kind and its ranks: peers that have not noticed it get both.
        (PeerLostError("rank 1 has died", (1,)), [("lost", (1,))]),
        (CollectiveTimeoutError("rank 1 is late", (1,)), [("timeout", (1,))]),
        (PeerFailedError("rank 1 failed", 1, "its traceback"), []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_exit_after_peer_error_does_not_report_own_failure(monkeypatch, error, expected):
    """The hook for exit runs after an uncaught exception."""
    with collective.init() as comm:
        failures = []
        monkeypatch.setattr(comm.inner.transport, "abort", failures.append)
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        session._leave()
        assert [(failure.kind, failure.ranks) for failure in failures] == expected


def test_forked_child_exit_keeps_parent_in_communicator(launches):  # noqa: F811
    script = launches.script(
        """
        import collective, numpy as np, warnings
        comm = collective.init()
        comm.barrier()
        if comm.rank == 1:
            child = os.fork()
            if child == 0:
                sys.exit(0)  # runs what is to run at exit
            os.waitpid(child, 0)
        print("sum", comm.all_reduce(np.ones(1))[0], flush=True)
        comm.close()
        """
    )
    done = launches.run("-n", "2", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


# Rank 1 receives when rank 0 is in its exit handlers, or is about to raise.
UNWAITED = """
import atexit
import collective, numpy as np

comm = collective.init()
big = np.arange(300_000.0)
if rank == 0:
    atexit.register(arrive)
    pending = {"dup": comm.dup, "comm": lambda: comm, "raise": lambda: comm}[sys.argv[1]]()
    pending.send(big, 1, async_op=True)
    comm.recv(None, 1, async_op=True)  # which nobody sends
    if sys.argv[1] == "raise":
        raise ValueError("its own")
else:
    pending = comm.dup() if sys.argv[1] == "dup" else comm
    if sys.argv[1] != "raise":
        while not os.path.exists("arrived-0"):
            time.sleep(0.01)
        time.sleep(0.3)  # in which a rank that does not wait has gone
        print("received", pending.recv(None, 0)[-1])
    try:
        comm.barrier()
    except (collective.PeerLostError, collective.PeerFailedError) as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("backend", "kind"), [("shm", "comm"), ("shm", "dup"), in_whole("gloo", "comm")], ids=str
)
def test_end_of_program_delivers_what_was_sent(launches, backend, kind):  # noqa: F811
    done = launches.run("-n", "2", "--backend", backend, launches.script(UNWAITED), kind)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[1] received 299999.0\n[1] PeerLostError\n"


def test_failed_program_does_not_wait_for_its_messages(launches):  # noqa: F811
    done = launches.run("-n", "2", launches.script(UNWAITED), "raise")
    assert "ValueError: its own" in done.stderr
    assert done.stdout == "[1] PeerFailedError\n"


def test_end_of_thread_delivers_what_was_sent(launches):  # noqa: F811
    program = """
        import threading, collective, numpy as np
        ended = vars(threading).setdefault("ended", threading.Event())
        comm = collective.init()
        comm.barrier()
        if comm.rank == 0:
            comm.send(np.arange(300_000.0), 1, async_op=True)
            ended.set()
        else:
            ended.wait()
            print(comm.recv(None, 0)[-1])
        """
    (launches.directory / "threads.py").write_text(textwrap.dedent(program))
    done = launches.run("-n", "2", "--backend", "threads", "threads.py")
    assert (done.returncode, done.stdout) == (0, "[1] 299999.0\n"), done.stderr


def test_end_of_multiprocessing_child_delivers_what_was_sent(tmp_path):
    (tmp_path / "spawning.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys, collective, numpy as np

            def main(rank, ended):
                comm = collective.init("shm", rank=rank, size=2, store=sys.argv[1])
                if rank == 0:
                    comm.send(np.arange(300_000.0), 1, async_op=True)
                    ended.set()
                else:
                    ended.wait()
                    print(comm.recv(None, 0)[-1])
                    try:
                        comm.barrier()
                    except collective.PeerLostError as error:
                        assert "has closed" in str(error), error
                        print("closed")

            if __name__ == "__main__":
                context = multiprocessing.get_context("spawn")
                ended = context.Event()
                children = [context.Process(target=main, args=(r, ended)) for r in range(2)]
                for child in children:
                    child.start()
                for child in children:
                    child.join()
            """
        )
    )
    done = run_python("spawning.py", str(tmp_path / "store"), cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout == "299999.0\nclosed\n", done.stderr


CHILDREN_OF_A_RANK = """
import multiprocessing, os, subprocess, sys, tempfile
import collective, numpy as np

def child(way, **settings):
    try:
        with collective.init(start_timeout=20, **settings) as comm:
            print(way, "joined", comm.rank, "of", comm.size, comm.all_reduce(np.ones(1))[0])
    except collective.errors.ConfigError as error:
        assert "rank 1 of 2" in str(error) and "__main__" in str(error), error
        print(way, "refused")

def program(way, strip=(), shell=""):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strip)}
    command = [sys.executable, __file__, way]
    subprocess.run(["sh", "-c", '"$@"; true', "sh", *command] if shell else command, env=kept)

def process(way):
    one = multiprocessing.get_context(way).Process(target=child, args=(way,))
    one.start()
    one.join()

if sys.argv[1:]:
    child(sys.argv[1], **{"rank": 0, "size": 1} if sys.argv[1] == "alone" else {})
elif __name__ == "__main__":
    server = multiprocessing.get_context("forkserver").Process(target=int)
    tempfile.tempdir = "/tmp"  # the address of the fork server may have only 107 bytes
    server.start()  # the fork server is older than the communicator
    server.join()
    tempfile.tempdir = None
    comm = collective.init()
    if comm.rank == 1:
        program("program")
        program("shell", shell="sh")
        program("torch's variables", ("COLLECTIVE_",))
        program("our variables", ("RANK", "WORLD_", "LOCAL_", "MASTER_"))
        program("no variables", ("COLLECTIVE_", "RANK", "WORLD_", "LOCAL_", "MASTER_"))
        program("alone")
        for way in ("spawn", "forkserver", "fork"):
            process(way)
    comm.barrier()
    comm.close()
    program("next world")
"""


def test_init_in_child_of_rank_raises_unless_place_is_free(launches):  # noqa: F811
    (launches.directory / "children.py").write_text(CHILDREN_OF_A_RANK)
    done = launches.run("-n", "2", "--backend", "shm", "children.py")
    assert done.returncode == 0, done.stderr
    programs = "program", "shell", "torch's variables", "our variables"
    lines = {
        *(f"[1] {way} refused" for way in (*programs, "spawn", "forkserver", "fork")),
        *(f"[1] {way} joined 0 of 1 1.0" for way in ("no variables", "alone")),
        *(f"[{rank}] next world joined {rank} of 2 2.0" for rank in range(2)),
    }
    assert set(done.stdout.splitlines()) == lines


def test_sys_exit_inside_with_block_is_a_failure(launches):  # noqa: F811
    script = launches.script(
        """
        import collective
        with collective.init() as comm:
            comm.barrier()
            if comm.rank == 1:
                sys.exit(3)
            comm.barrier()
        """
    )
    assert launches.run("-n", "2", script).returncode == 3


def test_exit_with_work_in_flight_prints_no_error(tmp_path):
    done = _python(
        """
        import collective, threading
        comm = collective.init("shm")
        work = comm.all_reduce(__import__("numpy").ones(3), async_op=True)
        print("fine")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_uncaught_error_shows_no_inner_frame_here_nor_to_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    program = """
import collective
with collective.init() as comm:
    comm.all_reduce([1.0], op="mean")
"""
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    done = run_python("-c", program, env=environ)
    told = json.loads(file.read_text())["message"]
    for text in (done.stderr, told):
        assert text.count("  File ") == 1, text
        assert text.endswith("Use op='avg'.\n"), text


def test_init_of_nccl_without_a_driver_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLECTIVE_CUDA_LIBRARY", "/absent/libcuda.so.1")
    with pytest.raises(BackendUnavailableError, match=r"/absent/libcuda\.so\.1 cannot be loaded"):
        collective.init("nccl")


def test_init_whose_store_cannot_be_reached_prints_one_rendezvous_error() -> None:
    program = "import collective; collective.init('tcp')"
    done = run_python(
        "-c", program, merged=True, COLLECTIVE_RANK="1", COLLECTIVE_SIZE="2",
        COLLECTIVE_LOCAL_RANK="0", COLLECTIVE_LOCAL_SIZE="1", COLLECTIVE_SECRET="none",
        COLLECTIVE_STORE="tcp://no-such-host.invalid:29500", COLLECTIVE_START_TIMEOUT="1",
    )  # fmt: skip
    assert done.returncode == 1
    assert "does not resolve" in done.stdout.splitlines()[-1], done.stdout
    assert done.stdout.count("RendezvousError: ") == 1, done.stdout
