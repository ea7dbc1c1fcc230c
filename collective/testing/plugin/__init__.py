"""The plugin of pytest: the mark ``ranks`` makes a test a parallel one.

pytest imports this package at every start, through the entry point group ``pytest11``. So it is
also installed separately, as ``collective_pytest``, and imports :mod:`collective` only for a run
that has tests with such marks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

__all__ = ["comm", "mpi_comm", "torch_group"]

# Seconds that a test may take, and that one may take whose mark is another plugin's: these tests
# were written without a limit.
_TIMEOUT_S, _FOREIGN_TIMEOUT_S = 60.0, 300.0
_UNITS = {"s": 1, "m": 60, "h": 3600}
# The parameter of a test with several numbers of ranks.
_PARAMETER = "_ranks"


class _Wanted(NamedTuple):
    """What a mark asks for.

    Attributes:
        mark: name of the mark.
        sizes: numbers of ranks; the test runs once with each.
        transport: name of the transport.
        timeout: seconds that the test may take.
        label: name of the number of ranks in the id of a test with several.
    """

    mark: str
    sizes: tuple[int, ...]
    transport: str = "shm"
    timeout: float = _TIMEOUT_S
    label: str = "ranks"


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, (Sequence, range)) else (value,)
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise TypeError(f"{value!r} is no positive number of ranks, nor a list of such numbers")
    return sizes


def _ranks(ranks: Any, *, transport: str = "shm", timeout: float = _TIMEOUT_S) -> _Wanted:
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise TypeError(f"timeout {timeout!r} is no positive number of seconds")
    return _Wanted("ranks", _sizes(ranks), transport, timeout)


def _parallel(nprocs: Any = 3) -> _Wanted:
    sizes = _sizes(nprocs)
    return _Wanted("parallel", sizes, timeout=_FOREIGN_TIMEOUT_S, label="nprocs")


def _mpi(ranks: Any = None, timeout: float | None = None, unit: str = "s", **_: Any) -> Any:
    if ranks is None:  # the mark of pytest-mpi, whose ranks are those of an mpiexec around pytest
        return None
    seconds = _FOREIGN_TIMEOUT_S if timeout is None else timeout * _UNITS.get(unit, 1)
    return _Wanted("mpi", _sizes(ranks), timeout=seconds, label="")


# For each mark: how its arguments are read, its line for `pytest --markers`, and the packages of
# plugins that have a mark of this name. If such a plugin is there, the mark is left to it.
_MARKS: dict[str, tuple[Callable[..., _Wanted | None], str, set[str]]] = {
    "ranks": (
        _ranks,
        "ranks(numbers, transport='shm', timeout=60): run the test on that many ranks of "
        "collective, or once for each number of a list",
        set(),
    ),
    "parallel": (
        _parallel,
        "parallel(nprocs=3): the same, as mpi-pytest spells it",
        {"pytest_mpi"},
    ),
    "mpi": (
        _mpi,
        "mpi(ranks, timeout=300, unit='s'): the same, as pytest-isolate-mpi spells it",
        {"pytest_mpi", "pytest_isolate_mpi"},
    ),
}
_left = pytest.StashKey[set[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks that no other plugin has."""
    plugins = config.pluginmanager.get_plugins()
    packages = {
        getattr(each, "__name__", type(each).__module__).partition(".")[0] for each in plugins
    }
    config.stash[_left] = {name for name, mark in _MARKS.items() if mark[2] & packages}
    for name, mark in _MARKS.items():
        if name not in config.stash[_left]:
            config.addinivalue_line("markers", mark[1])


def _wanted(node: pytest.Item) -> _Wanted | None:
    """Return what the marks of a test ask for, None without such a mark.

    Raises:
        pytest.Collector.CollectError: the arguments of a mark are wrong, or ``ranks`` stands beside
            the mark of a plugin that would start ranks of its own.
    """
    left = node.config.stash[_left]
    for name, (read, line, _) in _MARKS.items():
        mark = node.get_closest_marker(name)
        if mark is None or name in left:
            continue
        try:
            found = read(*mark.args, **mark.kwargs)
        except TypeError as error:
            raise pytest.Collector.CollectError(
                f"{node.nodeid}: the mark {name} is wrong: {str(error).split('() ')[-1]}. Write "
                f"{line.partition(': ')[0]}."
            ) from None
        for other in left if found else ():
            if node.get_closest_marker(other) is not None:
                raise pytest.Collector.CollectError(
                    f"{node.nodeid}: has the marks {name} and {other}, and the plugin of {other} "
                    "is active and would start ranks, too. Remove one mark, or switch that plugin "
                    "off with -p no:NAME."
                )
        if found is not None:
            return found
    return None


def _size(item: pytest.Item, found: _Wanted) -> int:
    """Return the number of ranks of one test.

    Raises:
        pytest.Collector.CollectError: there are several, and the test cannot be repeated.
    """
    callspec = getattr(item, "callspec", None)
    for name in ("mpi_ranks", _PARAMETER) if callspec else ():
        if name in callspec.params:  # type: ignore[union-attr]
            return int(callspec.params[name])  # type: ignore[union-attr]
    if len(found.sizes) > 1:
        raise pytest.Collector.CollectError(
            f"{item.nodeid}: the mark {found.mark} has several numbers of ranks, but only a test "
            "that is a function can run once for each. Give it one number."
        )
    return found.sizes[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat a test for each number of ranks."""
    found = _wanted(metafunc.definition)
    if found is None:
        return
    own = found.mark == "mpi" and "mpi_ranks" in metafunc.fixturenames
    if own or len(found.sizes) > 1:
        name = "mpi_ranks" if own else _PARAMETER
        if not own:
            metafunc.fixturenames.append(name)
        ids = [f"{found.label}={size}".removeprefix("=") for size in found.sizes]
        metafunc.parametrize(name, found.sizes, ids=ids)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Make ready for the tests with marks, if there are any."""
    plan: dict[pytest.Item, tuple[str, int, float] | Exception] = {}
    for item in session.items:
        try:
            found = _wanted(item)
            if found is not None:
                plan[item] = found.transport, _size(item, found), found.timeout
        except pytest.Collector.CollectError as error:
            plan[item] = error  # reported when the test runs
    if plan and not session.config.option.collectonly:
        importlib.import_module("collective.testing.ranked_items").start(session, plan)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """Let pytest show an error of this package at the line that called it: the text explains it."""
    errors = sys.modules.get("collective.errors")
    error = call.excinfo.value if call.excinfo else None
    seen: set[int] = set()  # two exceptions may be each other's cause
    while errors is not None and error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.startswith(errors.HOMES):
                trace.tb_frame.f_globals["__tracebackhide__"] = _explains_itself
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def _explains_itself(raised: pytest.ExceptionInfo[BaseException]) -> bool:
    return isinstance(raised.value, sys.modules["collective.errors"].ToldByText)


def _of_rank(request: pytest.FixtureRequest) -> Any:
    module = sys.modules.get("collective.testing.rank_session")
    rank = module and module.here()
    if rank is None:
        pytest.fail(
            f"the fixture {request.fixturename} is for tests on ranks. Mark this test with "
            "@pytest.mark.ranks(2).",
            pytrace=False,
        )
    return rank


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """Communicator of the ranks of this test, which no other test has."""
    return _of_rank(request).communicator(request)


@pytest.fixture
def mpi_comm(request: pytest.FixtureRequest) -> Any:
    """Communicator of mpi4py with the ranks of this test."""
    return _of_rank(request).mpi_communicator()


@pytest.fixture
def torch_group(request: pytest.FixtureRequest) -> Any:
    """Default process group of torch.distributed with the ranks of this test."""
    return _of_rank(request).torch_group()
