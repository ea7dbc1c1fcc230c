"""Choose the tests that ``make quick`` and ``make test`` run. ``make test-all`` runs all tests.

Two marks stand beside the tests: on a module, a function or a case.

* ``quick``: ``make quick`` runs it. A quick test needs no other transports than threads, shared
  memory and the loopback, no launcher and no GPU fake.
* ``whole``: only ``make test-all`` runs it. It runs a whole program: a benchmark, an example, a
  page of the documentation, a tool with all transports, an installation, a program of another
  project. Or it repeats facts: those of a conformance suite with another number or place of ranks,
  those of a second MPI library, and outside of ``tests/backends`` those of other transports than
  threads and shared memory.

The tests of ``make test`` prove each fact once: of each test function those cases run that have a
value which no case before them has. A test of 3 transports × 4 dtypes runs 6 cases: 4 dtypes over
the first transport, and the first dtype over the 2 others. Of the conformance suite each check
runs over each transport with one number of ranks, 3 if possible, and each case of a check runs over
at least one transport.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collective.testing.conformance import BoundCheck

__all__ = ["SLOW", "WHOLE", "in_quick", "in_whole", "key", "may_run", "one_of_each"]

_TESTS = Path(__file__).resolve().parents[1]
_QUICK = re.compile(r"\b(mark\.quick|in_quick)\b")
_WHOLE_MODULE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.whole\b", re.MULTILINE)

#: The slowest files, slowest first. They start in this order, so that no slow file runs alone at
#: the end. The summary reports a slow file that is missing here.
SLOW = """
    system/benchmarks backends/shm/conformance backends/mpi/conformance
    backends/conformance algorithms/conformance
    backends/hierarchical/transport docs/pages backends/message_waits
    backends/mpi/failures adapters/chainer/chainermn/launch
    training/splits/cuts backends/nccl/conformance
    backends/mpi/cuda_aware backends/gloo/conformance
    meta/broken_transports tools/doctor backends/faults
    tools/parity_faults launch/several_hosts system/packaging system/hosts system/gpu_suite
    launch/clusters
    system/training_examples adapters/chainer/transports system/examples backends/tcp/flow
    backends/tcp/conformance backends/mpi/transport tools/bench_command adapters/torch/transports
    contract/forking adapters/torch/plugin_programs adapters/torch/shards_elastic
    elastic/shard_training adapters/process_settings testing/ranks_failures testing/ranks_fixtures
    adapters/mpi4py/programs tools/profile_command
""".split()

#: Transports of which ``make test`` runs each case of the conformance suite: much of the code of
#: shm is its own.
WHOLE = frozenset({"shm"})


def key(path: Path) -> str:
    """Return the name of a test file in the lists: ``folder/module`` without ``test_``."""
    if not path.is_relative_to(_TESTS):
        return path.stem
    room = path.relative_to(_TESTS).parent
    return str(room / path.stem.removeprefix("test_"))


def in_quick(*values: object) -> Any:
    """Return the parameters of a case that ``make quick`` runs, of a test with other cases."""
    return pytest.param(*values, marks=pytest.mark.quick)


def in_whole(*values: object) -> Any:
    """Return the parameters of a case that only ``make test-all`` runs."""
    return pytest.param(*values, marks=pytest.mark.whole)


def may_run(path: Path, mark: str) -> bool:
    """Say whether a file may have tests for ``make quick`` or ``make test``, without its import.

    Args:
        path: the file.
        mark: ``"quick"`` or ``"once"``.
    """
    source = path.read_text(encoding="utf-8")
    return bool(_QUICK.search(source)) if mark == "quick" else not _WHOLE_MODULE.search(source)


def one_of_each(
    items: Iterable[pytest.Item], whole: frozenset[str] = frozenset()
) -> list[pytest.Item]:
    """Return the cases that have a parameter's value that no earlier case of the test has.

    Cases with the mark ``whole`` are omitted. Tests without parameters stay.

    Args:
        items: the tests.
        whole: transports of which each case of the conformance suite stays.
    """
    kept = set()
    seen: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    items = [item for item in items if item.get_closest_marker("whole") is None]
    for item in sorted(items, key=lambda item: _ranks(item) != 3):
        values = [*_values(item, whole)]
        if not values or any(value not in seen[scope] for scope, value in values):
            kept.add(item)
            for scope, value in values:
                seen[scope].add(value)
    return [item for item in items if item in kept]


def _ranks(item: pytest.Item) -> int | None:
    """Return the number of ranks of a check of the conformance suite, and None for other tests."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return next((each.size for each in params.values() if isinstance(each, BoundCheck)), None)


def _values(item: pytest.Item, whole: frozenset[str]) -> Iterator[tuple[Hashable, Hashable]]:
    """Yield the values of a case, each with the scope in which it must occur once.

    The scope is the test function and the parameter. For the cases of the conformance suite it is
    the whole run. Parameters of one ``parametrize`` are one value.
    """
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return
    params = dict(item.callspec.params)
    function = item.nodeid.partition("[")[0]
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0]
        names = tuple(n.strip() for n in given.split(",")) if isinstance(given, str) else given
        parts = tuple(params.pop(name, None) for name in names)
        if len(parts) == 1 and isinstance(parts[0], BoundCheck):
            yield from _values_of_check(function, parts[0], whole)
        else:
            # The objects of a mark are the same in all of its cases.
            yield (function, names), tuple(map(id, parts))
    for name, value in params.items():
        yield (function, name), id(value)


def _values_of_check(
    function: str, bound: BoundCheck, whole: frozenset[str]
) -> Iterator[tuple[Hashable, Hashable]]:
    suite, _, case = bound.id.partition("-check_")
    transport = suite.rpartition("-")[0]
    yield (function, transport), case.partition("[")[0]
    yield ("all cases", transport if transport in whole else ""), case
