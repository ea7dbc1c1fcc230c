"""pytest in the process of a rank, which runs this rank's part of one test after another.

The process is a copy of pytest's own process after the collection. So it has all items, and runs
one as pytest does, with fixtures, output and assertions of its own. It prints no reports, but
returns them.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pickle
import sys
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from collective import CollectiveTimeoutError, Communicator, CommunicatorAbortedError
from collective.inner import RankHungError, RanksFailedError, session

from .ranks import RankPool

# Hooks that report to the user, which only pytest's own process does.
_REPORTING = (
    "pytest_runtest_logstart",
    "pytest_runtest_logreport",
    "pytest_runtest_logfinish",
    "pytest_warning_recorded",
)


@dataclass(frozen=True)
class RankedTest:
    """One test for the ranks.

    Attributes:
        item: number of the test in the session.
        following: number of the next test of the same ranks, None if there is none.
        folder: path of a directory that no other test has; it need not exist.
        threads: how many ranks this process has, as threads; 0 if the process is one rank.
        transport: name of the transport.
        timeout: seconds that the test may take.
        ends: whether the test has run, and the ranks only end the fixtures that they have kept.
    """

    item: int
    following: int | None
    folder: str
    threads: int
    transport: str
    timeout: float
    ends: bool = False


@dataclass
class Reports:
    """What a rank's part of a test gave.

    Attributes:
        reports: pytest's reports, each in a form that can be pickled.
        warnings: message, category, file and line of each warning, and the time when it came.
        doubtful: whether the process may not run another test.
    """

    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[tuple[Any, type[Warning], str, int, str]] = field(default_factory=list)
    doubtful: bool = False


class _OfThreads:
    """Value of the fixture ``comm`` where the ranks are threads, which share all fixtures."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"comm.{name}: ranks that are threads share the fixtures, so only the test function "
            "itself has a communicator. Use it there, or mark the test with transport='shm'."
        )


class RankSession:
    """Plugin of pytest in the process of a rank. Create it before the processes are forked."""

    def __init__(self, of_pytest: pytest.Session) -> None:
        self._session = of_pytest
        self._manager = of_pytest.config.pluginmanager
        self._debugger = self._manager.get_plugin("pdbinvoke")
        self._pid = 0
        self._part = Reports()
        self._others: dict[int, str] = {}
        self._first = 0
        self._error: BaseException | None = None

    # -- the process ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Separate this process from pytest's own: its output, and what it reports."""
        global _here
        _here = self
        self._pid = os.getpid()
        capture = self._manager.get_plugin("capturemanager")
        if capture is not None:
            # The copied one writes to the same file as pytest's own process.
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        others = [each for _, each in self._manager.list_name_plugin() if each is not None]
        self._manager.register(self, "collective-rank")
        for name in _REPORTING:
            setattr(self._manager.hook, name, self._manager.subset_hook_caller(name, others))

    def end(self) -> None:
        """End the fixtures that are left, and save what coverage has measured."""
        self._session._setupstate.teardown_exact(None)
        coverage = sys.modules.get("coverage")
        measured = coverage and coverage.Coverage.current()
        if measured is not None:
            measured.save()

    # -- a test ---------------------------------------------------------------------------------

    def run(self, comm: Communicator, task: RankedTest) -> Reports:
        """Run this rank's part of a test."""
        self._comm, self._task = comm, task
        self._part, self._others = Reports(), {}
        items = self._session.items
        item = items[task.item]
        following = None if task.following is None else items[task.following]
        if self._debugger is not None and not self._manager.is_registered(self._debugger):
            self._manager.register(self._debugger, "pdbinvoke")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {} if task.threads else self._variables().items():
                patch.setenv(f"COLLECTIVE_{name}", value)
            if task.ends:
                # pytest's own hook for the end of a test may be called once for each test.
                end = item.session._setupstate.teardown_exact
                ended = pytest.CallInfo.from_call(lambda: end(None), "teardown")
                report = item.ihook.pytest_runtest_makereport(item=item, call=ended)
                item.ihook.pytest_runtest_logreport(report=report)
            else:
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if os.getpid() != self._pid:
                # A child that the test has forked, and that has run out of the test.
                os._exit(1)
            distributed = sys.modules.get("torch.distributed")
            if distributed and distributed.is_available() and distributed.is_initialized():
                distributed.destroy_process_group()
        return self._part

    def _variables(self) -> dict[str, str]:
        """Return the variables with which ``collective.init()`` connects the ranks of the test."""
        place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(self._comm.rank))
        place |= dict.fromkeys(("SIZE", "LOCAL_SIZE"), str(self._comm.size))
        place["STORE"] = f"{self._task.folder}.store"
        return {**place, "BACKEND": self._task.transport, "TIMEOUT": str(self._comm.timeout)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run the test as pytest does. A plugin that repeats tests would do so on one rank."""
        runtestprotocol(item, nextitem=nextitem)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """End the fixtures of earlier tests that were to be followed by another test."""
        item.session._setupstate.teardown_exact(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note the failure of this rank in its report."""
        report = yield
        if call.excinfo is not None:
            error = call.excinfo.value
            said = f"{type(error).__name__}: {str(error) or 'no text'}".splitlines()[0]
            follows = isinstance(error, (CommunicatorAbortedError, CollectiveTimeoutError))
            report.failure = [follows, time.monotonic(), said]  # type: ignore[attr-defined]
            if self._others:
                annotate(report, self._first, self._task.threads, self._others)
            self._error = error
        return report

    def _may_debug(self) -> bool:
        """Return whether this rank is the first to fail, so that only one has the debugger."""
        with contextlib.suppress(FileExistsError):
            Path(f"{self._task.folder}.pdb").touch(exist_ok=False)
            return True
        return False

    def _leave(self, error: BaseException) -> None:
        """Break the communicators of this test: its own, and one that it has made by init()."""
        comms = [self._comm]
        with contextlib.suppress(Exception):
            comms.append(session.current())
        for comm in comms:
            if not comm.closed:
                comm.__exit__(type(error), error, error.__traceback__)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a report for pytest's own process, and let the other ranks know of a failure."""
        hook = self._session.config.hook
        data = hook.pytest_report_to_serializable(config=self._session.config, report=report)
        self._part.reports.append(data)
        error, self._error = self._error, None
        if error is not None and type(report) is pytest.TestReport:  # a test survives a subtest
            if self._debugger is not None and not self._may_debug():
                with contextlib.suppress(AssertionError):
                    self._manager.unregister(self._debugger)
            self._leave(error)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Keep a warning for pytest's own process."""
        w = warning_message
        category: type[Warning] = w.category
        try:
            pickle.dumps(category)
        except (pickle.PicklingError, AttributeError):  # a class inside a function
            category = pytest.PytestWarning
        self._part.warnings.append((str(w.message), category, w.filename, w.lineno, when))

    # -- ranks that are threads -----------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Call the test on each thread that is a rank."""
        __tracebackhide__ = True
        task = self._task
        if not task.threads:
            return None
        names = inspect.signature(pyfuncitem.obj).parameters
        values = {name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}
        failed: RanksFailedError | None = None
        with RankPool(task.threads, task.transport) as pool:
            try:
                pool.run(_call, pyfuncitem.obj, values, timeout=task.timeout)
            except RanksFailedError as error:
                failed = error
        if failed is not None:
            self._first = next(iter(failed.errors))
            self._others = {
                rank: f"{type(error).__name__}: {error}".splitlines()[0]
                for rank, error in failed.errors.items()
            } | dict.fromkeys(failed.results, "passed")
            del self._others[self._first]
            self._part.doubtful = any(
                isinstance(error, RankHungError) for error in failed.errors.values()
            )
            raise failed.cause
        return True

    # -- fixtures -------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: Any) -> Path | None:
        """Make ``tmp_path`` a directory that all ranks of the test share."""
        if fixturedef.func.__module__ != "_pytest.tmpdir" or fixturedef.argname != "tmp_path":
            return None
        path = Path(self._task.folder)
        path.mkdir(mode=0o700, exist_ok=True)
        fixturedef.cached_result = (path, fixturedef.cache_key(request), None)
        return path

    def communicator(self, request: pytest.FixtureRequest) -> Any:
        """Return the value of the fixture ``comm``."""
        if self._task.threads:
            return _OfThreads()
        marks = [mark.name for mark in request.node.iter_markers()]
        return self.mpi_communicator() if "mpi" in marks and "ranks" not in marks else self._comm

    def mpi_communicator(self) -> Any:
        """Return the value of the fixture ``mpi_comm``."""
        # Imported here, because few tests are programs of mpi4py.
        return importlib.import_module("collective.adapters.mpi4py").communicator(self._comm)

    def torch_group(self) -> Any:
        """Return the value of the fixture ``torch_group``."""
        if self._task.threads:
            pytest.fail(
                "torch_group: a process has one default group, so the ranks cannot be threads. Use "
                "transport='shm'.",
                pytrace=False,
            )
        distributed = importlib.import_module("torch.distributed")
        importlib.import_module("collective.adapters.torch")
        comm = self._comm
        distributed.init_process_group(
            "collective",
            store=distributed.FileStore(f"{self._task.folder}.torch", comm.size),
            rank=comm.rank,
            world_size=comm.size,
            timeout=timedelta(seconds=comm.timeout),
        )
        return distributed.group.WORLD


_here: RankSession | None = None


def here() -> RankSession | None:
    """Return the session of the rank that this process is, None in another process."""
    return _here


def run_item(comm: Communicator, task: RankedTest) -> Reports:
    """Run a rank's part of a test, in the process of the rank."""
    assert _here is not None
    return _here.run(comm, task)


def _call(comm: Communicator, function: Any, values: dict[str, Any]) -> None:
    """Call a test on a thread that is a rank."""
    __tracebackhide__ = True
    function(
        **{name: comm if isinstance(value, _OfThreads) else value for name, value in values.items()}
    )


def annotate(report: Any, rank: int, size: int, others: dict[int, str]) -> None:
    """Add to the report of a failure whose it is, and a line for what each other rank said."""
    lines = [f"rank {other}: {said}" for other, said in sorted(others.items())]
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"rank {rank}: {crash.message}"
    if hasattr(report.longrepr, "addsection"):
        report.longrepr.addsection(f"rank {rank} of {size} failed first", "\n".join(lines), "-")
    elif isinstance(report.longrepr, str):
        report.longrepr = "\n".join([f"rank {rank} of {size}: {report.longrepr}", *lines])
