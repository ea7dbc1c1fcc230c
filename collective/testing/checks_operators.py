"""Checks of user-defined operators that fail: no rank goes on with an invalid result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from collective import (
    CollectiveError,
    Communicator,
    InvalidArgumentError,
    PeerFailedError,
    ReduceOp,
    user_op,
)

from .checks import RankFactory, check, folds_for_users
from .heard import Heard, hold
from .samples import LARGE, assert_same, expected, regions, values


class _OperatorError(Exception):
    """Error that the operator raises."""


_FOLDING: dict[str, Callable[[Communicator, Any, ReduceOp, bool], Any]] = {
    "all_reduce": lambda comm, x, op, later: comm.all_reduce(x, op=op, async_op=later),
    "reduce": lambda comm, x, op, later: comm.reduce(x, op=op, root=0, async_op=later),
    "reduce_scatter": lambda comm, x, op, later: comm.reduce_scatter(x, op=op, async_op=later),
    "scan": lambda comm, x, op, later: comm.scan(x, op=op, async_op=later),
}


class _FaultyOperator(NamedTuple):
    """Fault of a user-defined operator on one rank; on the other ranks it adds.

    Attributes:
        victim: the rank on which the operator fails.
        shortens: if true, the operator returns no elements there, else it raises.
        later: whether the call is made in the background.
    """

    victim: int
    shortens: bool
    later: bool


@check([{"call": call} for call in _FOLDING], at_least=2, needs=folds_for_users)
def check_failed_operator(factory: RankFactory, size: int, *, call: str) -> None:
    """Check that an operator that fails on one rank makes the same call raise on every rank."""
    operators = [
        _FaultyOperator(0, shortens=False, later=False),
        _FaultyOperator(size - 1, shortens=True, later=False),
        _FaultyOperator(size - 1, shortens=False, later=True),
    ]
    used = [_used(factory, size, call, operator) for operator in operators]
    assert any(used), f"{call}: neither the first rank nor the last folded anything"


def _used(factory: RankFactory, size: int, call: str, operator: _FaultyOperator) -> bool:
    """Check one faulty operator; return whether the victim used it."""
    victim = operator.victim
    outcomes = factory.run(size, _failed_operator, call, operator, fresh=True)
    if not outcomes[victim].failed:
        # The victim folded nothing. Then the result has to be right.
        assert all(outcome.error is None for outcome in outcomes), f"{call}: {outcomes}"
        return False
    own: type[Exception] = InvalidArgumentError if operator.shortens else _OperatorError
    says = "returned shape (0,)" if operator.shortens else "no such sum"
    for rank, outcome in enumerate(outcomes):
        what = f"rank {rank} in {call} with an operator that failed on rank {victim}"
        if rank != victim:
            hold(outcome, PeerFailedError, what, own.__name__, says, rank=victim)
        elif type(outcome.error) is not own or says not in str(outcome.error):
            raise AssertionError(f"{what}: got {outcome.error!r} instead of {own.__name__}")
    return True


@dataclass
class _Folded(Heard):
    """Outcome of a fold on a rank: the error or None, and whether its operator failed."""

    error: Any
    failed: bool


def _failed_operator(comm: Communicator, call: str, operator: _FaultyOperator) -> _Folded:
    failed: list[bool] = []

    def fold(a: Any, b: Any) -> Any:
        if comm.rank != operator.victim:
            return a + b
        failed.append(True)
        if operator.shortens:
            return a[:0]
        raise _OperatorError("no such sum")

    # Transports take different paths in the background, for short arrays and for long ones.
    later = operator.later
    count = LARGE if later else 7
    inputs = [values("int64", count, rank, 90) for rank in range(comm.size)]
    since = time.monotonic()
    error: Exception | None = None
    try:
        result = _FOLDING[call](comm, inputs[comm.rank], user_op(fold), later)
        result = result.wait() if later else result
    except (CollectiveError, _OperatorError) as problem:
        error = problem
    seconds = time.monotonic() - since
    if error is None and not failed:
        _hold_fold(call, result, inputs, comm.rank)
    return _Folded(error, seconds, bool(failed))


def _hold_fold(call: str, found: Any, inputs: list[Any], rank: int) -> None:
    """Check that a rank has the right result of a call of :data:`_FOLDING`."""
    total = expected("sum", inputs)
    part = list(regions(total.size, len(inputs)))[rank]
    wanted = {
        "all_reduce": total,
        "reduce": None if rank else total,
        "reduce_scatter": total[part],
        "scan": expected("sum", inputs[: rank + 1]),
    }[call]
    if wanted is None:
        assert found is None, f"{call}: rank {rank} got {found!r}"
    else:
        assert_same(found, wanted, call)
