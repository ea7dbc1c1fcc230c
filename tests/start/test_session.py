"""init(), the current communicator, and how a program that ends tells its peers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

import collective
from collective.errors import (
    BackendNotFoundError,
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
from collective.start.config import load
from collective.start.resolver import build
from collective.testing import run_ranks
from tests.support.interpreter import run_python
from tests.support.launches import ROOT, launches  # noqa: F401


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch):
    """Run where no configuration file is found, and forget the current communicator."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_of_process", None)


def _python(body: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", textwrap.dedent(body), env={"PATH": "/usr/bin:/bin"})


# -- one rank ------------------------------------------------------------------------------


def test_one_rank_works_with_nothing_configured():
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
def test_one_rank_over_any_transport(backend, chosen):
    with collective.init(backend) as comm:
        assert comm.backend == chosen
        assert comm.all_reduce(np.ones(100_000)).sum() == 100_000
        assert comm.split(0).size == 1


def test_module_level_calls_use_the_communicator_of_init():
    collective.init()  # nobody keeps it
    assert (collective.rank(), collective.size()) == (0, 1)
    assert collective.all_reduce(np.ones(2)).tolist() == [1, 1]
    assert collective.current().rank == 0
    collective.current().close()


def test_a_later_init_is_the_current_one():
    first, second = collective.init(), collective.init("shm")
    assert collective.current() is second
    second.close()
    with pytest.raises(CommunicatorClosedError, match=r"collective\.init"):
        collective.rank()
    first.close()


@pytest.mark.parametrize("call", ["rank", "size", "barrier", "current"])
def test_without_a_communicator_module_level_calls_say_what_to_do(call):
    with pytest.raises(CommunicatorClosedError, match=r"call collective\.init\(\) first"):
        getattr(collective, call)()


def test_a_call_of_a_broken_communicator_that_was_closed_says_which_call_it_is():
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
        ({"backend": "cuda:nccl"}, ConfigError, "cpu:shm"),
        ({"time_out": 3}, ConfigError, "timeout"),
        ({"rank": 0, "size": 2}, ConfigError, "store"),
        ({"rank": 5, "size": 2}, ConfigError, "rank"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_wrong(arguments, error, expected):
    with pytest.raises(error, match=expected):
        collective.init(**arguments)
    with pytest.raises(CommunicatorClosedError):
        collective.current()


# -- an MPI.Comm that the program made -----------------------------------------------------


class Pretended(types.ModuleType):
    """What init() asks of mpi4py.MPI before it goes on to the transport."""

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
def test_comm_that_is_none_of_mpi4pys_is_refused(comm, mpi4py):
    with pytest.raises(InvalidArgumentError, match=r"comm=.*MPI\.Intracomm"):
        collective.init(comm=comm)


def test_comm_is_refused_where_mpi4py_was_never_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(InvalidArgumentError, match=r"MPI\.Intracomm"):
        collective.init(comm=Pretended.Intracomm())
    assert "mpi4py.MPI" not in sys.modules


def test_intercommunicators_and_the_null_communicator_are_refused(mpi4py):
    for comm in (mpi4py.Intercomm(), mpi4py.COMM_NULL):
        with pytest.raises(InvalidArgumentError, match="that this process is in"):
            collective.init(comm=comm)


def test_comm_decides_who_the_ranks_are(mpi4py, tmp_path):
    with pytest.raises(InvalidArgumentError, match="together with rank, size, store"):
        collective.init(comm=mpi4py.Intracomm(), rank=0, size=1, store=tmp_path)
    with pytest.raises(ConfigError, match="timeout"):
        collective.init(comm=mpi4py.Intracomm(), time_out=3)


def test_comm_is_refused_by_ranks_that_are_threads(mpi4py):
    session.thread_world(build(load({})))
    try:
        with pytest.raises(UnsupportedError, match="mpiexec"):
            collective.init(comm=mpi4py.Intracomm())
    finally:
        session.thread_world(None)


# -- ranks that are threads ----------------------------------------------------------------


def test_each_thread_that_is_a_rank_has_its_own_current_communicator():
    def program(comm):
        collective.barrier()
        total = int(collective.all_reduce(np.array([collective.rank()]))[0])
        return collective.current() is comm, collective.rank(), collective.size(), total

    assert run_ranks(3, program) == [(True, rank, 3, 3) for rank in range(3)]


def test_the_calls_of_the_module_are_those_of_a_communicator():
    for name in ("all_reduce", "empty", "split", "send_object"):
        ours, theirs = getattr(collective, name), getattr(collective.Communicator, name)
        assert ours.__doc__ == theirs.__doc__
        assert ours.__name__ == name


# -- the end of a program ------------------------------------------------------------------


def test_an_exception_is_told_to_the_peers_without_a_body(launches):  # noqa: F811
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


def test_a_program_that_ends_without_closing_tells_that_it_left(launches):  # noqa: F811
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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("mine"), [("failed", ())]),
        # As what it was, with the ranks it was about: who has not noticed yet hears that.
        (PeerLostError("rank 1 has died", (1,)), [("lost", (1,))]),
        (CollectiveTimeoutError("rank 1 is late", (1,)), [("timeout", (1,))]),
        (PeerFailedError("rank 1 failed", 1, "its traceback"), []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_who_only_heard_of_a_failure_does_not_pass_for_its_cause(monkeypatch, error, expected):
    """At exit, after an exception that nobody caught."""
    with collective.init() as comm:
        found = []
        monkeypatch.setattr(comm.transport, "abort", found.append)
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        session._leave()
        assert [(failure.kind, failure.ranks) for failure in found] == expected


def test_a_forked_child_that_ends_does_not_leave_for_its_parent(launches):  # noqa: F811
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


def test_a_rank_that_leaves_with_an_exit_code_is_a_failure(launches):  # noqa: F811
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


def test_init_leaves_nothing_behind_when_a_program_just_ends(tmp_path):
    done = _python(
        """
        import collective, threading
        comm = collective.init("shm")
        work = comm.all_reduce(__import__("numpy").ones(3), async_op=True)
        print("fine")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
