"""Random cases beyond the fixed cases, and the smallest case that fails."""

from __future__ import annotations

import contextlib
import pprint
from collections.abc import Callable, Sequence
from typing import Any

from collective import InvalidArgumentError
from collective.inner import framework

from .cases import MOVES, REDUCTIONS, ROOTED, Case, CaseLeaf, reduces
from .runner import CaseResult, CaseRunner, Comparison
from .transports import Transport

try:
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st
    from hypothesis.errors import FlakyFailure
except ImportError as error:
    raise InvalidArgumentError(
        f"--random: {error}. Random cases need hypothesis: pip install hypothesis"
    ) from error

__all__ = ["cases", "explore"]

# Largest length of an axis, and of long arrays, which have more elements than a first message.
_LENGTH, _LONG = 6, 40_000
_STEPS = (1, 2, 3, -1, -2)
_SEEDS = 1000
_PROGRAM = """\
from collective.tools.parity.cases import Case, CaseLeaf
from collective.tools.parity.runner import reproduce

CASE = {case}

if __name__ == "__main__":
    reproduce("{backend}", {size}, CASE)
"""


class _Failing(Exception):
    """Error for hypothesis that a case failed; hypothesis then shrinks the case."""


def explore(
    plan: Comparison, transport: Transport, count: int, step: Callable[[], None]
) -> dict[str, Any]:
    """Try ``count`` random cases over a transport; return the outcome.

    Args:
        plan: the frameworks, operations, reductions, dtypes, numbers of ranks and the seed.
        step: called after each case; a case that fails is shrunk, which takes further cases.

    Returns:
        ``passed``, and if that is False the ``case``, its ``text`` and a ``snippet``.
    """
    kinds = plan.kinds(transport)
    imported = list(dict.fromkeys(name for names in kinds.values() for name in names))
    failing: list[CaseResult] = []
    with contextlib.ExitStack() as stack:
        ranks = {
            size: stack.enter_context(CaseRunner(transport, size, imported, plan.timeout))
            for size in plan.sizes
        }

        @seed(plan.seed)
        @settings(
            max_examples=count, deadline=None, database=None, print_blob=False,
            report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(cases(plan, list(kinds.values())))
        def attempt(drawn: tuple[int, Case]) -> None:
            size, case = drawn
            outcome = ranks[size].run(case)
            step()
            if outcome.status == "failed":
                failing.append(outcome)
                raise _Failing

        found: dict[str, Any] = {
            "transport": transport.name, "count": count, "seed": plan.seed, "passed": True,
        }  # fmt: skip
        try:
            attempt()
        except (_Failing, FlakyFailure) as error:
            smallest = failing[-1]
            flaky = "It does not fail every time. " if isinstance(error, FlakyFailure) else ""
            found |= {
                "passed": False,
                "case": f"{smallest.case.title()}, {smallest.size} ranks",
                "text": flaky + smallest.text,
                "snippet": _PROGRAM.format(
                    case=pprint.pformat(smallest.case),
                    backend=transport.backend,
                    size=smallest.size,
                ),
            }
    return found


def cases(
    plan: Comparison, kinds: Sequence[tuple[str, ...]]
) -> st.SearchStrategy[tuple[int, Case]]:
    """Return the strategy that draws a number of ranks and a case for them."""
    operations = [name for name in plan.operations if name in (*REDUCTIONS, *MOVES)]
    if not operations or not kinds:
        raise InvalidArgumentError(
            "--random: no operation or framework to draw from; allow more of --op."
        )
    return st.sampled_from(sorted(plan.sizes)).flatmap(
        lambda size: st.tuples(st.just(size), _case(plan, operations, kinds, size))
    )


@st.composite
def _case(
    draw: Any,
    plan: Comparison,
    operations: Sequence[str],
    kinds: Sequence[tuple[str, ...]],
    size: int,
) -> Case:
    operation = draw(st.sampled_from(operations))
    held = draw(st.sampled_from(kinds))
    known = frozenset.intersection(*(framework(name).dtypes() for name in held))
    op, order = "sum", None
    dtypes = [dtype for dtype in plan.dtypes if dtype in known]
    if operation in REDUCTIONS:
        ops = [op for op in plan.ops if operation != "scan" or op != "avg"]
        op = draw(st.sampled_from([op for op in ops if any(reduces(op, d) for d in dtypes)]))
        dtypes = [dtype for dtype in dtypes if reduces(op, dtype)]
        if operation != "scan" and op in ("sum", "prod", "avg", "min", "max"):
            order = draw(st.sampled_from([None, "rank"]))
    data = draw(_data(dtypes))
    single = data if isinstance(data, CaseLeaf) else None
    axis, counts, rows = 0, None, None
    if single is not None and single.shape:
        if operation in ("scatter", "gather", "all_gather", "all_to_all", "reduce_scatter"):
            axis = draw(st.integers(0, len(single.shape) - 1))
        if operation in ("scatter", "reduce_scatter", "all_to_all"):
            counts = draw(st.none() | _counts(single.shape[axis], size))
        elif operation in ("gather", "all_gather"):
            lengths = st.lists(st.integers(0, _LENGTH), min_size=size, max_size=size)
            rows = draw(st.none() | lengths.map(tuple))
    may_omit = operation in ("broadcast", "scatter")
    return Case(
        operation, data, op, order,
        root=draw(st.integers(0, size - 1)) if operation in ROOTED else 0,
        axis=axis, counts=counts, rows=rows, frameworks=held,
        outs=(draw(st.sampled_from(["new", "given", "in place"])),),
        omitted=draw(st.booleans()) if may_omit else False,
        seed=draw(st.integers(0, _SEEDS)),
    )  # fmt: skip


def _data(dtypes: Sequence[str]) -> st.SearchStrategy[Any]:
    """Return the strategy of an array, or of a nested structure of arrays."""
    leaf = _leaf(dtypes)
    return leaf | st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
        ),
        max_leaves=4,
    )


@st.composite
def _leaf(draw: Any, dtypes: Sequence[str]) -> CaseLeaf:
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(
        st.lists(st.integers(0, _LENGTH), max_size=3).map(tuple)
        | st.integers(_LENGTH, _LONG).map(lambda length: (length,))
    )
    steps = st.lists(st.sampled_from(_STEPS), min_size=len(shape), max_size=len(shape)).map(tuple)
    return CaseLeaf(shape, dtype, draw(st.just(()) | steps))


def _counts(length: int, size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Return the strategy of ``size`` counts that add up to ``length``."""
    cuts = st.lists(st.integers(0, length), min_size=size - 1, max_size=size - 1).map(sorted)
    return cuts.map(lambda at: tuple(b - a for a, b in zip([0, *at], [*at, length])))
