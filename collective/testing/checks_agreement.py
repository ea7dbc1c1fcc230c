"""Checks of calls that differ between ranks: every rank gets a clear error, and no damage."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective import Communicator, MismatchError, Shards

from .checks import Case, able, on_each_rank
from .samples import assert_same

_Call = Callable[[Communicator], Any]


def _x(count: int = 6, dtype: str = "float32") -> Any:
    return np.ones(count, dtype)


# Name -> the call of most ranks, the call of the last rank, and words of both for the error text.
_DISAGREEMENTS: dict[str, tuple[_Call, _Call, tuple[str, str]]] = {
    "op": (
        lambda comm: comm.all_reduce(_x(), op="sum"),
        lambda comm: comm.all_reduce(_x(), op="max"),
        ("sum", "max"),
    ),
    "shape": (
        lambda comm: comm.all_reduce(_x(6)),
        lambda comm: comm.all_reduce(_x(7)),
        ("[6]", "[7]"),
    ),
    "dimensions": (
        lambda comm: comm.all_reduce(_x(6)),
        lambda comm: comm.all_reduce(_x(6).reshape(2, 3)),
        ("[6]", "[2, 3]"),
    ),
    "dtype": (
        lambda comm: comm.all_reduce(_x(6, "float32")),
        lambda comm: comm.all_reduce(_x(6, "float64")),
        ("float32", "float64"),
    ),
    "root": (
        lambda comm: comm.reduce(_x(), root=0),
        lambda comm: comm.reduce(_x(), root=1),
        ("root=0", "root=1"),
    ),
    "root of a broadcast": (
        lambda comm: comm.broadcast(_x(), root=0),
        lambda comm: comm.broadcast(_x(), root=1),
        ("root=0", "root=1"),
    ),
    "shape of a broadcast": (
        lambda comm: comm.broadcast(_x(6), root=0),
        lambda comm: comm.broadcast(_x(7), root=0),
        ("[6]", "[7]"),
    ),
    "operation": (
        lambda comm: comm.all_reduce(_x()),
        lambda comm: comm.broadcast(_x(), root=0),
        ("all_reduce", "broadcast"),
    ),
    "barrier": (
        lambda comm: comm.all_gather(_x()),
        lambda comm: comm.barrier(),
        ("all_gather", "barrier"),
    ),
    "order": (
        lambda comm: comm.all_reduce(_x(), order="rank"),
        lambda comm: comm.all_reduce(_x()),
        ("order=rank", "all_reduce"),
    ),
    "shards": (
        lambda comm: _fold_of_shards(comm, 0),
        lambda comm: _fold_of_shards(comm, comm.size - 1),
        ("4 shards (0-3, none", "none, 0-3)"),
    ),
    "dtype of a gather": (
        lambda comm: comm.all_gather(_x(6, "int32")),
        lambda comm: comm.all_gather(_x(6, "float32")),
        ("int32", "float32"),
    ),
    "columns of a gather": (
        lambda comm: comm.all_gather(np.ones((3, 4))),
        lambda comm: comm.all_gather(np.ones((3, 5))),
        ("[3, 4]", "[3, 5]"),
    ),
    "counts": (
        lambda comm: comm.reduce_scatter(_x(8 * comm.size), counts=[8] * comm.size),
        lambda comm: comm.reduce_scatter(
            _x(8 * comm.size), counts=[7, *[8] * (comm.size - 2), 9]
        ),
        ("8", "7"),
    ),
    "nesting": (
        lambda comm: comm.all_reduce([_x(2), _x(4)]),
        lambda comm: comm.all_reduce([_x(4), _x(2)]),
        ("all_reduce", "all_reduce"),
    ),
    "memory": (
        lambda comm: comm.empty(6),
        lambda comm: comm.empty(7),
        ("empty(float32[6]", "empty(float32[7]"),
    ),
    "large": (
        lambda comm: comm.all_reduce(_x(1 << 19)),
        lambda comm: comm.all_reduce(_x((1 << 19) + 1)),
        ("524288", "524289"),
    ),
}  # fmt: skip
_CASES: list[Case] = [{"what": what} for what in _DISAGREEMENTS]


def _fold_of_shards(comm: Communicator, holder: int) -> Any:
    """Fold four shards that one rank holds."""
    held = [range(4) if rank == holder else range(0) for rank in range(comm.size)]
    shards = Shards(4, comm, held=held)
    return comm.all_reduce(np.ones((len(shards.mine), 3)), order=shards)


# compare=True: some transports compare calls only if the communicator asks for it.
@on_each_rank(_CASES, at_least=2, compare=True)
def check_mismatch(comm: Communicator, what: str) -> None:
    """Check that different calls raise MismatchError on every rank, and later calls succeed."""
    _hold_mismatch(comm, what)


def _hold_mismatch(comm: Communicator, what: str) -> None:
    most, last, words = _DISAGREEMENTS[what]
    text = _expect_mismatch(comm, last if comm.rank == comm.size - 1 else most)
    for turn in range(2):
        total = comm.all_reduce(np.array([turn + 1.0]))
        assert_same(total, np.array([(turn + 1.0) * comm.size]), "the call after a mismatch")
    _hold_words(comm, text, words)


def _hold_words(comm: Communicator, text: str, words: Sequence[str]) -> None:
    for word in words:
        if word not in text:
            raise AssertionError(f"rank {comm.rank}'s error does not contain {word!r}: {text}")


def _expect_mismatch(comm: Communicator, call: _Call) -> str:
    try:
        result = call(comm)
    except MismatchError as error:
        return str(error)
    raise AssertionError(f"rank {comm.rank} got {result!r} although the ranks disagree")


@on_each_rank(at_least=2, compare=True)
def check_mismatch_names_ranks(comm: Communicator) -> None:
    """Check that MismatchError says which rank did what, and where in its program."""
    namespace: dict[str, Any] = {}
    # A separate source, so that the file and lines of the calls do not depend on this file.
    source = "def one(comm, x):\n    comm.all_reduce(x)\n\n\ndef two(comm, x):\n"
    source += "    comm.all_reduce(x, op='max')\n"
    exec(compile(source, "a_users_program.py", "exec"), namespace)
    program = namespace["two" if comm.rank == comm.size - 1 else "one"]
    text = _expect_mismatch(comm, lambda comm: program(comm, _x()))
    last = [line for line in text.splitlines() if "max" in line]
    if not last or f"{comm.size - 1}" not in last[0]:
        raise AssertionError(
            f"rank {comm.rank}'s error does not name the rank that called with max: {text}"
        )
    _hold_words(comm, text, ["a_users_program.py:2", "a_users_program.py:6"])


@on_each_rank(at_least=2, compare=True)
def check_mismatch_writes_nothing(comm: Communicator) -> None:
    """Check that the arrays of a call are unchanged after a mismatch."""
    for count in (6, 30_000):
        x = np.full(count, comm.rank, np.float64)
        out = np.full(count, -1.0)
        op = "max" if comm.rank == 0 else "sum"
        for target in (out, x):
            _expect_mismatch(comm, functools.partial(_all_reduce, x=x, op=op, out=target))
        assert_same(x, np.full(count, comm.rank, np.float64), "the input of a mismatch")
        assert_same(out, np.full(count, -1.0), "out of a mismatch")


def _all_reduce(comm: Communicator, **options: Any) -> Any:
    return comm.all_reduce(options.pop("x"), **options)


_needs_checks = able("checks_calls", "compares calls only when asked to")


@on_each_rank(_CASES[:3], at_least=2, needs=_needs_checks)
def check_mismatch_by_itself(comm: Communicator, what: str) -> None:
    """Check that a transport with ``checks_calls`` compares every call by default."""
    _hold_mismatch(comm, what)


@on_each_rank([{"what": what} for what in ("dtype of a gather", "columns of a gather")], at_least=2)
def check_gather_mismatch(comm: Communicator, what: str) -> None:
    """Check that gathers of differing dtypes or columns are refused on any transport."""
    _hold_mismatch(comm, what)


@on_each_rank(at_least=2, compare=True)
def check_mismatch_in_background(comm: Communicator) -> None:
    """Check that wait() raises a background call's mismatch, and the calls after it go on."""
    good = comm.all_reduce(np.array([1]), async_op=True)
    bad = comm.all_reduce(_x(), op="max" if comm.rank == 0 else "sum", async_op=True)
    after = comm.all_reduce(np.array([2]), async_op=True)
    _expect_mismatch(comm, lambda comm: bad.wait())
    assert isinstance(bad.exception(), MismatchError), f"exception() is {bad.exception()!r}"
    assert_same(good.wait(), np.array([comm.size]), "the call before a mismatch")
    assert_same(after.wait(), np.array([2 * comm.size]), "the call after a mismatch")


# Calls whose arguments may differ between the ranks.
_MAY_DIFFER: tuple[_Call, ...] = (
    lambda comm: comm.gather(_x(1 + comm.rank), root=1, async_op=True),
    lambda comm: comm.all_gather(_x(1 + comm.rank), async_op=True),
    lambda comm: comm.all_to_all(_x(comm.size + comm.rank), async_op=True),
    lambda comm: comm.scatter(_x() if comm.rank == 0 else None, async_op=True),
    lambda comm: comm.broadcast(_x() if comm.rank == 0 else None, async_op=True),
    lambda comm: comm.broadcast([_x()] if comm.rank == 2 else None, root=2, async_op=True),
)
# The records of calls that have waited for a second may be compared.
_LATE_S = 2.5


@on_each_rank(at_least=3)
def check_late_rank_is_no_mismatch(comm: Communicator) -> None:
    """Check that ranks whose arguments may differ wait for a late rank, such as in a gather."""
    groups = [comm.dup() for _ in _MAY_DIFFER]
    if comm.rank == 1:
        time.sleep(_LATE_S)
    for work in [call(group) for call, group in zip(_MAY_DIFFER, groups, strict=True)]:
        work.wait()
    for group in groups:
        group.close()
