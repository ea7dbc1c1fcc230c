"""Every fault on every transport: which errors the ranks get, how soon, and what remains.

The table consists of :data:`FAULTS` and :data:`EXCEPTIONS`. The programs of the ranks are in
fault_programs.py. The faults in :data:`OF_THE_SUITE` have a check in the public suite: this module
only checks that the suite's tests run that check on the transport with several ranks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="gloo and hierarchical need PyTorch")

from collective import errors
from collective.launch import process_starter
from collective.testing import RankDiedError, RankPool, RanksFailedError, faults
from tests.backends import test_conformance
from tests.backends.gloo import test_conformance as test_gloo_conformance
from tests.backends.hierarchical import test_transport as test_hierarchical
from tests.backends.mpi import test_conformance as test_mpi_conformance
from tests.backends.shm import test_conformance as test_shm_conformance
from tests.backends.tcp import test_conformance as test_tcp_conformance
from tests.support import fault_programs
from tests.support.fault_heard import Heard, Program, Survived, held
from tests.support.fault_programs import VICTIM
from tests.support.launches import Marked
from tests.support.mpi_launches import VENDORS, launch_of, marks_of
from tests.support.selection import in_whole
from tests.support.simulated_hosts import Pairs

pytestmark = [
    # The first test of a column waits for all faults of that column: ten seconds, or many times
    # as long on a busy machine.
    pytest.mark.timeout(300),
]

SIZE = 3
COLUMNS = ("threads", "shm", "tcp", "gloo", *VENDORS, "hierarchical")
# The promised delay of an error, and the delay that a busy machine may add.
PROMISED_S, BUSY_S = 2.0, 10.0
# Deadline of a call that notices no fault, and of the job, after which its ranks are killed.
CALL_S, JOB_S = 25.0, 240.0
# Time after which a call that is not compared counts as stalled.
STALL_S = 1.0
NUL = b"\0"


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        program: program of the ranks.
        plan: faults that the testing package injects into it.
        victims: ranks that the fault hits.
        victim: name of the victims' error, "" for no error, "dies" if their processes end.
        others: possible names of the other ranks' error; several if the timing decides.
        named: whether the error of the other ranks names the victims.
        usable: whether the communicator is usable after the fault.
        seconds: time within which the ranks get their errors.
    """

    program: Program
    plan: tuple[faults.Fault, ...] = ()
    victims: tuple[int, ...] = (VICTIM,)
    victim: str = ""
    others: tuple[str, ...] = ("",)
    named: bool = False
    usable: bool = True
    seconds: float = PROMISED_S

    @property
    def lethal(self) -> bool:
        """Whether processes end, so that the row needs ranks for itself."""
        return self.victim == "dies"


LOST: dict[str, Any] = {"others": ("PeerLostError",), "named": True, "usable": False}
FAILED: dict[str, Any] = {"others": ("PeerFailedError",), "named": True, "usable": False}
LATE: dict[str, Any] = {
    "victim": "CommunicatorAbortedError",
    "others": ("CollectiveTimeoutError",),
    "named": True,
    "usable": False,
    "seconds": 0.5 + PROMISED_S,
}
NO_MEMORY: dict[str, Any] = {"victim": "AllocationError", "others": ("AllocationError",)}
STALLED: dict[str, Any] = {
    "victim": "MismatchError",
    "others": ("MismatchError",),
    "usable": False,
    "seconds": STALL_S + PROMISED_S,
}
KILLS = (faults.kill(1, at_call=3), faults.kill(2, at_call=3))

FAULTS = {
    **{
        f"{what} mismatch, not compared": Fault(fault_programs.differing(what), **STALLED)
        for what in ("shape", "dtype", "op", "call", "root")
    },
    "fd limit": Fault(fault_programs.no_descriptor_for_a_group, **NO_MEMORY),
    "fd limit of memory": Fault(fault_programs.no_descriptor_for_memory, **NO_MEMORY),
    "memory limit": Fault(fault_programs.no_memory_for_memory, **NO_MEMORY),
    "memory limit of a result": Fault(fault_programs.no_memory_for_a_result, victim="MemoryError"),
    "handler that returns": Fault(fault_programs.handled),
    "SIGALRM again and again": Fault(fault_programs.alarmed, seconds=10.0),
    "SIGSTOP": Fault(fault_programs.stopped, **LATE),
    # Where rank 0 runs the hub of all monitors, only the stopped hub knows which rank is missing.
    "SIGSTOP of rank 0": Fault(partial(fault_programs.stopped, victim=0), victims=(0,), **LATE),
    "close with work that ends": Fault(fault_programs.closes_with_work, **LOST),
    "close with work that does not": Fault(
        fault_programs.closes_with_work_for_ever, victim="CollectiveTimeoutError",
        others=("CommunicatorAbortedError", "CollectiveTimeoutError", "PeerLostError"),
        usable=False,
    ),
    "SIGINT": Fault(fault_programs.interrupted, victim="KeyboardInterrupt", **FAILED),
    "exit": Fault(fault_programs.exits, victim="dies", **LOST),
    "two killed": Fault(fault_programs.two_killed, victims=(1, 2), victim="dies", **LOST),
}  # fmt: skip

_A_PROCESS = "the fault hits the process, and all ranks are its threads"
_COMPARED = "the transport compares calls: see check_mismatch_by_itself"
# For a column and a row: the expected fault (None if it cannot happen there) and the reason.
EXCEPTIONS: dict[tuple[str, str], tuple[Fault | None, str]] = {
    **{
        ("threads", name): (None, _A_PROCESS)
        for name in FAULTS
        if name.startswith(("SIG", "handler", "exit", "fd", "memory"))
    },
    **{
        (column, name): (None, _COMPARED)
        for column in COLUMNS
        for name in FAULTS
        if name.endswith("not compared") and column != "gloo"
    },
    **{
        (column, "fd limit"): (
            Fault(fault_programs.no_descriptor_for_a_group),
            "a group takes no descriptor",
        )
        for column in VENDORS
    },
    **{
        (column, "fd limit of memory"): (
            Fault(fault_programs.no_descriptor_for_memory),
            "the memory is ordinary memory",
        )
        for column in ("gloo", "tcp", *VENDORS)
    },
    ("gloo", "root mismatch, not compared"): (
        replace(FAULTS["root mismatch, not compared"], others=("MismatchError", "")),
        "a rank that has sent its part has completed the call",
    ),
    ("threads", "two killed"): (
        replace(FAULTS["two killed"], program=fault_programs.until_it_breaks, plan=KILLS),
        "killing a rank that is a thread raises an error in it",
    ),
}

# For each fault with a check in the suite: the check, and its case if the check has several.
OF_THE_SUITE: dict[str, tuple[str, dict[str, str]]] = {
    "kill": ("check_killed_peer", {}),
    "kill in the middle": ("check_killed_in_the_middle", {}),
    "late": ("check_late_peer", {}),
    "given up": ("check_given_up_message", {}),
    "late in one call": ("check_timeout_of_one_call", {}),
    "leave": ("check_left_peer", {}),
    "raise": ("check_failed_peer", {}),
    "abort": ("check_abort", {}),
    "fork": ("check_fork", {}),
    "user op raising": ("check_failed_operator", {}),
    "hook raising": ("check_failed_hook", {}),
    **{
        f"{what} mismatch": ("check_mismatch", {"what": {"call": "operation"}.get(what, what)})
        for what in ("shape", "dtype", "op", "call", "root")
    },
}
SUITE = {
    "threads": [test_conformance.test_threads_pass_suite],
    "shm": [test_shm_conformance.test_shm_passes_suite],
    "tcp": [test_tcp_conformance.test_tcp_passes_suite],
    "gloo": [test_gloo_conformance.test_gloo_passes_suite],
    "mpich": [test_mpi_conformance.test_mpich_passes_suite],
    "openmpi": [
        test_mpi_conformance.test_openmpi_passes_suite,
        test_mpi_conformance.test_openmpi_of_4_passes_suite,
    ],
    "hierarchical": [test_hierarchical.test_host_pairs_pass_suite],
}
NOT_OF_THE_SUITE = {
    (
        "mpich",
        "kill in the middle",
    ): "MPICH ends the process: mpi/test_failures.py tests that"
}


def rows_of(column: str) -> dict[str, Fault]:
    """Return the faults that can happen on a transport, by name."""
    rows = {name: EXCEPTIONS.get((column, name), (row, ""))[0] for name, row in FAULTS.items()}
    return {name: row for name, row in rows.items() if row is not None}


class Column:
    """Ranks on one transport: their errors from each fault, and what they could leave behind."""

    def __init__(self, name: str, directory: Path, marked: Marked) -> None:
        self.name = name
        self.directory = directory
        self.segments: set[str] = set()
        self._marked = marked
        self._survived: list[dict[str, Survived]] | RanksFailedError | None = None
        launch = launch_of(name) if name in VENDORS else None
        backend = {"hierarchical": Pairs, "mpich": "mpi", "openmpi": "mpi"}.get(name, name)
        self._pool = RankPool(SIZE, backend, timeout=JOB_S, mpiexec=launch)

    def survived(self, name: str) -> list[Survived]:
        """Return each rank's outcome of a fault that leaves the processes alive.

        All such faults of a column happen in one job, because starting processes takes longer than
        most faults.
        """
        if self._survived is None:
            programs = {
                name: row.program for name, row in rows_of(self.name).items() if not row.lethal
            }
            try:
                self._survived = self._pool.run(
                    fault_programs.survived, programs, call_timeout=CALL_S
                )
            except RanksFailedError as failure:
                self._survived = failure
        if isinstance(self._survived, RanksFailedError):
            raise self._survived
        by_rank = [outcomes[name] for outcomes in self._survived]
        self.segments.update(path for outcomes in by_rank for path in outcomes.after.segments)
        return by_rank

    def killed(self, fault: Fault) -> dict[int, Any]:
        """Return each rank's result or error in a job in which processes end."""
        self.segments.update(
            path for resources in self._pool.run(held) for path in resources.segments
        )
        with pytest.raises(RanksFailedError) as caught:
            self._pool.run(fault.program, call_timeout=CALL_S, faults=fault.plan)
        return {**caught.value.results, **caught.value.errors}

    def close(self) -> None:
        """End the ranks."""
        self._pool.close()

    def left(self) -> list[str]:
        """Return the processes and files that remain after the last rank has ended."""
        self.close()
        end = time.monotonic() + BUSY_S
        while (processes := self._processes()) and time.monotonic() < end:
            time.sleep(0.05)
        paths = [path for path in self.segments if os.path.exists(path)]
        return processes + paths + os.listdir(self.directory)

    def _processes(self) -> list[str]:
        """Return the processes of this column that are still running."""
        processes = []
        for pid in self._marked.living():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                # The resource tracker of multiprocessing ends together with the tests.
                if b"tracker" not in command:
                    processes.append(f"{pid}: {command.replace(NUL, b' ').decode()}")
        return processes


class Columns:
    """The current column, and what the columns before it left behind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._now: Column | None = None
        self._left: dict[str, list[str]] = {}

    def at(self, name: str) -> Column:
        """Return a column, after ending the ranks of any other column."""
        if self._now is None or self._now.name != name:
            self.leave()
            (self._directory / name).mkdir(exist_ok=True)
            tempfile.tempdir = os.environ["TMPDIR"] = str(self._directory / name)
            marked = Marked()  # marks all processes of the column
            os.environ[marked.variable] = marked.value
            self._now = Column(name, self._directory / name, marked)
        return self._now

    def leave(self) -> None:
        """End the current column, and record what it left behind."""
        if self._now is not None:
            self._left[self._now.name] = self._now.left()
            self._now = None

    def left(self, name: str) -> list[str]:
        """Return what a column left behind."""
        if name not in self._left:
            self.at(name).survived(next(iter(rows_of(name))))
            self.leave()
        return self._left[name]


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Columns]:
    with pytest.MonkeyPatch.context() as patch:
        # Start each rank as a new process, which inherits the mark in the environment. Copies of a
        # preloaded server would have the server's environment.
        patch.setattr(process_starter, "_preloaded", [])
        # These calls only make monkeypatch restore the values at the end.
        patch.setenv(Marked.variable, "")
        patch.setenv("TMPDIR", tempfile.gettempdir())
        patch.setattr(tempfile, "tempdir", None)
        transports = Columns(tmp_path_factory.mktemp("faults"))
        yield transports
        transports.leave()


def cells() -> Iterator[Any]:
    for column in COLUMNS:
        for name in rows_of(column):
            yield pytest.param(column, name, id=f"{column}-{name}", marks=marks_of(column))


@pytest.mark.parametrize(("column", "name"), list(cells()))
def test_fault_raises_expected_errors(columns: Columns, column: str, name: str) -> None:
    fault = rows_of(column)[name]
    if fault.lethal:
        for rank, outcome in columns.at(column).killed(fault).items():
            if rank in fault.victims:
                assert isinstance(outcome, RankDiedError), f"rank {rank}: {outcome}"
            else:
                assert_heard(rank, outcome, fault)
        return
    for rank, survived in enumerate(columns.at(column).survived(name)):
        assert_heard(rank, survived.heard, fault)
        assert not survived.after.more_than(survived.before), f"rank {rank}: {survived}"


def assert_heard(rank: int, heard: Heard, fault: Fault) -> None:
    """Check that ``rank`` got the expected error in time."""
    context = f"rank {rank}: {heard}"
    victim = rank in fault.victims
    assert isinstance(heard, Heard), context
    assert heard.error in ((fault.victim,) if victim else fault.others), context
    assert heard.seconds <= fault.seconds + BUSY_S, context
    if fault.named and not victim:
        assert heard.ranks, context
        assert set(heard.ranks) <= set(fault.victims), context
    if fault.usable:
        assert heard.later == "usable", context
        return
    kinds = (
        errors.CommunicatorAbortedError,
        # A rank that has not seen a disagreement yet may get it from this call, and a rank that has
        # closed the communicator gets an error that says so.
        errors.MismatchError,
        errors.CollectiveTimeoutError,
        *((errors.CommunicatorClosedError,) if victim else ()),
    )
    assert issubclass(getattr(errors, heard.later, object), kinds), context


@pytest.mark.parametrize("column", [pytest.param(name, marks=marks_of(name)) for name in COLUMNS])
def test_faults_leave_nothing_behind(columns: Columns, column: str) -> None:
    assert columns.left(column) == []


@pytest.mark.parametrize("row", OF_THE_SUITE)
@pytest.mark.parametrize(
    "name", [in_whole(name) if name == "openmpi" else name for name in COLUMNS]
)
def test_suite_runs_check_of_fault(name: str, row: str) -> None:
    if (name, row) in NOT_OF_THE_SUITE:
        pytest.skip(NOT_OF_THE_SUITE[name, row])
    check, case = OF_THE_SUITE[row]
    runs = [
        bound
        for part in SUITE[name]
        for mark in part.pytestmark
        if mark.name == "parametrize"
        for bound in mark.args[1]
        if bound.check.name == check and bound.size > 1 and case.items() <= bound.case.items()
    ]
    assert runs


def test_exceptions_name_existing_cells() -> None:
    assert {column for column, _ in EXCEPTIONS} <= set(COLUMNS)
    assert {name for _, name in EXCEPTIONS} <= set(FAULTS)
