"""Tests on ranks in pytest's own process: which ranks run them, and one report of all ranks.

The ranks are forked after the collection, before any fixture begins (:mod:`.rank_session`). They
live from test to test. A rank that died or hung is replaced, and each test has a communicator of
its own, so no test harms the next one.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import sys
import time
import unittest
import warnings
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import pytest

from collective import CollectiveError
from collective.inner import RankHungError, RanksFailedError
from collective.launch.fork_starter import ForkServer, ForkStarter

from .rank_session import RankedTest, RankSession, Reports, annotate, run_item
from .ranks import RankPool, backend_class

# Seconds of a test under a debugger, and of the process whose threads are ranks beyond its test.
_NO_LIMIT_S, _MARGIN_S = 1e6, 10.0
_PHASES = ("setup", "call", "teardown")
_STOPS = (KeyboardInterrupt, pytest.exit.Exception)
# Transport, number of ranks, and seconds that the test may take.
_Order = tuple[str, int, float]
_Reports = dict[int, pytest.TestReport]


def start(session: pytest.Session, plan: Mapping[pytest.Item, _Order | Exception]) -> None:
    """Run tests of ``session`` on ranks.

    Args:
        session: session that has collected the tests.
        plan: transport, number of ranks and timeout of each such test, or why its mark is wrong.
    """
    plugin = RankedItems(session, plan)
    session.config.pluginmanager.register(plugin, "collective-ranks")
    session.config.add_cleanup(plugin.close)


class RankedItems:
    """Plugin of pytest that runs tests on ranks; the arguments are those of :func:`start`."""

    def __init__(
        self, session: pytest.Session, plan: Mapping[pytest.Item, _Order | Exception]
    ) -> None:
        self._session = session
        self._plan = plan
        self._base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._numbers = {item: number for number, item in enumerate(session.items)}
        self._pools: dict[tuple[str, int], RankPool] = {}
        # The last test of each pool, and the number of the one that its ranks keep fixtures for.
        self._last: dict[tuple[str, int], tuple[pytest.Item, int | None]] = {}
        # The ranks share what is imported before they are forked.
        for transport in {each[0] for each in plan.values() if isinstance(each, tuple)}:
            with contextlib.suppress(CollectiveError, ImportError):
                backend_class(transport)
        if any("torch_group" in getattr(item, "fixturenames", ()) for item in plan):
            with contextlib.suppress(ImportError):
                importlib.import_module("collective.adapters.torch")
        rank = RankSession(session)
        self._server = ForkServer(rank.begin, rank.end)

    def close(self) -> None:
        """End the ranks."""
        for pool in self._pools.values():
            pool.close()
        self._server.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """End the fixtures that ranks keep for a test that does not run here, as with -x and -n."""
        try:
            return (yield)
        finally:
            stopped = isinstance(sys.exception(), _STOPS)
            for item, following in [] if stopped else list(self._last.values()):
                for report in [] if following is None else self._run(item, ends=True):
                    if report.failed:
                        item.ihook.pytest_runtest_logreport(report=report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        """Run a test on ranks, if it has a mark, and report it."""
        if item not in self._plan:
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        run = pytest.CallInfo.from_call(lambda: self._run(item), "setup", reraise=_STOPS)
        reports = run.result if run.excinfo is None else [_report_of(item, run)]
        # A test of this process may have left fixtures that the next one does not share.
        end = self._session._setupstate.teardown_exact
        ended = pytest.CallInfo.from_call(lambda: end(nextitem), "teardown", reraise=_STOPS)
        if ended.excinfo is not None:
            reports = [*reports[:-1], _report_of(item, ended)]
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _following(self, item: pytest.Item, order: _Order) -> int | None:
        """Return the number of the next test of the same ranks, None if there is none."""
        for number in range(self._numbers[item] + 1, len(self._session.items)):
            other = self._plan.get(self._session.items[number])
            if isinstance(other, tuple) and other[:2] == order[:2]:
                return number
        return None

    def _pool(self, transport: str, size: int) -> RankPool:
        pool = self._pools.get((transport, size))
        if pool is None:
            kind = backend_class(transport)
            if kind.launcher:
                pytest.fail(
                    f"transport {transport!r} needs {kind.launcher} around its ranks, which a mark "
                    f"cannot start. Use collective.testing.RankPool({size}, {transport!r}).",
                    pytrace=False,
                )
            # A process whose threads are the ranks is alone.
            alone = kind.capabilities.in_process
            pool = RankPool(1 if alone else size, transport, starter=ForkStarter(self._server))
            self._pools[transport, size] = pool
        return pool

    def _run(self, item: pytest.Item, ends: bool = False) -> list[pytest.TestReport]:
        """Run a test on its ranks, or only end the fixtures that they have kept; return reports."""
        order = self._plan[item]
        if isinstance(order, Exception):
            raise order
        transport, size, limit = order
        pool = self._pool(transport, size)
        threads = size if pool.capabilities.in_process else 0
        if threads and issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
            pytest.fail(
                "a unittest.TestCase cannot run on ranks that are threads. Use transport='shm'.",
                pytrace=False,
            )
        debugging = self._session.config.option.usepdb
        limit = _NO_LIMIT_S if debugging else limit
        number = self._numbers[item]
        name = re.sub(r"\W", "_", item.name)[:30]
        folder = f"{self._base}/{name}-ranks{number}"
        following = None if ends else self._following(item, order)
        self._last[transport, size] = item, following
        task = RankedTest(number, following, folder, threads, transport, limit, ends)
        parts: Mapping[int, Reports] = {}
        errors: Mapping[int, BaseException] = {}
        try:
            with _interrupts_go_to_debugger() if debugging else contextlib.nullcontext():
                outer = limit + _MARGIN_S if threads else limit
                parts = dict(enumerate(pool.run(run_item, task, timeout=outer)))
        except RanksFailedError as failed:
            parts, errors = failed.results, failed.errors
        for error in errors.values():
            if isinstance(error, _STOPS):
                raise error
        if any(part.doubtful for part in parts.values()):
            self._pools.pop((transport, size)).close()
        self._warn(item, parts)
        return _merged(item, parts, errors, size)

    def _warn(self, item: pytest.Item, parts: Mapping[int, Reports]) -> None:
        """Record the warnings of the ranks, each once."""
        seen = dict.fromkeys(warning for part in parts.values() for warning in part.warnings)
        for text, category, file, line, when in seen:
            try:
                message = category(text)
            except Exception:  # the class of a user may want other arguments
                category, message = pytest.PytestWarning, pytest.PytestWarning(text)
            recorded = warnings.WarningMessage(message, category, file, line)
            item.ihook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": recorded,
                    "when": when,
                    "nodeid": item.nodeid,
                    "location": None,
                }
            )


@contextlib.contextmanager
def _interrupts_go_to_debugger() -> Iterator[None]:
    """Ignore Ctrl-C in this process. The terminal sends it to the rank with the debugger, too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _report_of(item: pytest.Item, call: pytest.CallInfo[Any]) -> pytest.TestReport:
    report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    return report


# -- one report of all ranks -------------------------------------------------------------------


def _merged(
    item: pytest.Item, parts: Mapping[int, Reports], errors: Mapping[int, BaseException], size: int
) -> list[pytest.TestReport]:
    """Return the reports of a test, made of those of its ranks.

    Args:
        item: the test.
        parts: what each rank returned.
        errors: how the other ranks ended.
        size: number of ranks. If they are threads, one process has returned for all.
    """
    load = item.config.hook.pytest_report_from_serializable
    phases: dict[str, _Reports] = {phase: {} for phase in _PHASES}
    extra = []
    for rank, part in sorted(parts.items()):
        for report in (load(config=item.config, data=data) for data in part.reports):
            if type(report) is pytest.TestReport:
                phases[report.when][rank] = report
            elif rank == min(parts) or not report.passed:  # of a subtest
                extra.append(report)
    said = {rank: _said(rank, phases) for rank in parts}
    if errors:
        # The ranks that ended did so in the phase in which another one failed.
        bad = [p for p in _PHASES if not all(each.passed for each in phases[p].values())]
        phase = min([*bad[:1], "call"], key=_PHASES.index)
        for rank, error in errors.items():
            said[rank] = _ending(rank, error)
            phases[phase][rank] = _synthetic(item, phase, "failed", said[rank])
    merged: list[pytest.TestReport] = []
    for phase, reports in phases.items():
        if phase == "call" and merged[0].outcome != "passed":
            continue
        if phase == "call":
            merged += extra
        merged.append(
            _one_of(reports, said, size) if reports else _synthetic(item, phase, "passed", None)
        )
    return merged


def _one_of(reports: _Reports, said: Mapping[int, str], size: int) -> pytest.TestReport:
    """Return the report of a phase: that of the rank that decides, or of all ranks."""
    first = min(reports, key=lambda rank: _precedence(reports[rank]))
    chosen = reports[first]
    if len(said) > 1 and chosen.failed:
        annotate(chosen, first, size, {r: text for r, text in said.items() if r != first})
    shown = reports if chosen.passed else {first: chosen}
    if len(said) > 1:
        chosen.sections = [
            (f"{title} (rank {rank})", text)
            for rank, report in shown.items()
            for title, text in report.sections
        ]
    chosen.start = min(report.start for report in reports.values())
    chosen.stop = max(report.stop for report in reports.values())
    chosen.duration = max(report.duration for report in reports.values())
    properties = [each for report in reports.values() for each in report.user_properties]
    chosen.user_properties = [p for n, p in enumerate(properties) if p not in properties[:n]]
    return chosen


def _precedence(report: pytest.TestReport) -> tuple[int, float]:
    """Return a sort key of the reports of ranks: the one that decides a phase comes first.

    A failure counts before a skip, and both before a failure that only follows from another rank's.
    """
    follows, when, _ = getattr(report, "failure", (False, 0.0, ""))
    if report.failed:
        # A rank passes a test that is marked to fail, while another rank fails as it should.
        passes = isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]")
        return 3 if passes else 4 if follows else 0, when
    if report.skipped:
        return 1 if hasattr(report, "wasxfail") else 2, when
    return 5, 0.0


def _said(rank: int, phases: Mapping[str, _Reports]) -> str:
    """Return one line for what a rank did."""
    for report in [phases[phase][rank] for phase in _PHASES if rank in phases[phase]]:
        if not report.passed:
            text = str(report.longrepr).splitlines()[0]
            return str(getattr(report, "failure", (0, 0, text))[2])
    return "passed"


def _ending(rank: int, error: BaseException) -> str:
    """Return how a rank ended that returned no reports, in one line or with its stack."""
    text = str(error.args[0] if error.args else error).removeprefix(f"rank {rank}: ")
    if not isinstance(error, RankHungError):
        return text
    return f"{text}; it was at {error.site or 'a line that it did not tell'}"


def _synthetic(item: pytest.Item, phase: Any, outcome: Any, text: str | None) -> pytest.TestReport:
    """Return a report of a phase of which no rank has reported."""
    now = time.time()
    report = pytest.TestReport(
        item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, text, phase,
        start=now, stop=now,
    )  # fmt: skip
    if text is not None:
        report.failure = [False, 0.0, text]  # type: ignore[attr-defined]
    return report
