"""Choose the tests that ``make quick`` and ``make test`` run. ``make test-all`` runs all tests.

The tests of ``make test`` prove each fact once: of each test function those cases run that have a
value which no case before them has. A test of 3 transports × 4 dtypes runs 6 cases: 4 dtypes over
the first transport, and the first dtype over the 2 others. Of the conformance suite each check
runs over each transport with one number of ranks, 3 if possible, and each case of a check runs over
at least one transport. Tests outside of ``tests/backends`` run over threads and shared memory.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

import pytest

from collective.testing.conformance import BoundCheck

__all__ = ["OMITTED", "QUICK", "SLOW", "WHOLE", "key", "one_of_each"]

_TESTS = Path(__file__).resolve().parents[1]

#: Files that ``make quick`` runs: in each folder the tests that need no other transports than
#: threads, shared memory and the loopback, no launcher and no GPU fake.
QUICK = """
    adapters/chainer/optimizer
    adapters/cupy/arrays adapters/torch/ddp adapters/torch/functional
    algorithms/arithmetic algorithms/conformance algorithms/costs algorithms/moves
    backends/shm/conformance backends/shm/ring backends/shm/transport backends/conformance
    communicator/heads communicator/objects communicator/rows
    contract/recorder contract/registry contract/work memory/arrays
    memory/dlpack memory/dtypes memory/nested meta/rooms
    package/errors package/ops start/choice start/config
    testing/kit training/splits/windows training/gradients training/pipelines
""".split()

#: Files that ``make test`` omits. Their tests run whole programs: benchmarks, examples, pages of
#: the documentation, tools with all transports, programs of other projects, installations,
#: trainings with losses, the package without Linux's calls. Or they repeat facts: those of an
#: adapter over each transport, those of messages with gigabytes.
OMITTED = """
    adapters/chainer/chainermn/launch adapters/chainer/processes adapters/chainer/transports
    adapters/cupy/transports
    adapters/torch/plugin_launch adapters/torch/plugin_programs adapters/torch/plugin_transports
    adapters/torch/shards_elastic adapters/torch/transports
    backends/mpi/cuda_aware backends/mpi/long_arrays
    docs/pages docs/site elastic/shard_training launch/clusters launch/several_hosts
    meta/broken_transports native/musl platform/without_linux
    system/benchmarks system/examples system/gpu_suite system/hosts system/launchers
    system/packaging system/torch_suite system/training_examples
    testing/mpi_ranks tools/bench_command tools/cli_ending tools/doctor tools/parity
    tools/parity_faults tools/parity_splits tools/profile_command
""".split()

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
    system/training_examples adapters/chainer/transports system/examples
    backends/mpi/transport tools/bench_command adapters/torch/transports
    contract/forking adapters/torch/plugin_programs adapters/torch/shards_elastic
    elastic/shard_training platform/without_linux
""".split()

#: Parts of the names of tests that ``make test`` omits in the files that it runs: a conformance
#: suite again, with another number or place of ranks or another setting; tests with a second MPI
#: library; and programs that take seconds for a single fact.
_OMITTED_NAMES = re.compile(
    r"_of_\d+_pass|_with_compared_results|old_nccl_passes|lopsided|pair_and_single|single_host_passes"
    r"|open_?mpi|over_mpi|sanitizers_report|versions_in_between|interpreter_exits"
    r"|outlive_interpreter|torch_compile|compiled_module|fork_children_may_end"
    r"|split_in_turn_of_random|checkers_report|compiles_all_modules"
)

#: Transports that repeat facts outside of ``tests/backends``.
_ELSEWHERE = re.compile(r"\[(.*-)?(gloo|mpi|mpich|hierarchical)\b")

#: Transports of which ``make test`` runs each case of the conformance suite: much of the code of
#: shm is its own.
WHOLE = frozenset({"shm"})


def key(path: Path) -> str:
    """Return the name of a test file in the lists: ``folder/module`` without ``test_``."""
    if not path.is_relative_to(_TESTS):
        return path.stem
    room = path.relative_to(_TESTS).parent
    return str(room / path.stem.removeprefix("test_"))


def one_of_each(
    items: Iterable[pytest.Item], whole: frozenset[str] = frozenset()
) -> list[pytest.Item]:
    """Return the cases that have a parameter's value that no earlier case of the test has.

    Tests without parameters stay.

    Args:
        items: the tests.
        whole: transports of which each case of the conformance suite stays.
    """
    kept = set()
    seen: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    items = [item for item in items if not _repeats(item)]
    for item in sorted(items, key=lambda item: _ranks(item) != 3):
        values = [*_values(item, whole)]
        if not values or any(value not in seen[scope] for scope, value in values):
            kept.add(item)
            for scope, value in values:
                seen[scope].add(value)
    return [item for item in items if item in kept]


def _repeats(item: pytest.Item) -> bool:
    """Say whether the name of a test tells that ``make test`` omits it."""
    room = key(item.path).partition("/")[0]
    return bool(
        _OMITTED_NAMES.search(item.name) or (room != "backends" and _ELSEWHERE.search(item.name))
    )


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
