"""Cases on ranks that are started once for many cases, and replaced after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from collective import BackendUnavailableError
from collective.inner import framework
from collective.testing import RankFactory, RankPool, RanksFailedError

from . import execution
from .cases import Case, matrix
from .execution import Verdict
from .transports import Transport

# Seconds in which ranks must import their frameworks, also on a busy machine.
_PREPARE_S = 120.0
# Longest time of a job, as a multiple of a call's timeout. After that the ranks count as hung.
_JOB_SHARE = 2.0
# Seconds until ranks that train count as hanging.
_JOB_S = 180.0
# Length of the end of an error's text that a row of the report has.
_TEXT = 600
# Reductions for all frameworks but the first. Each dtype has one of them, and the way in which
# arrays are passed and returned does not depend on the reduction.
_FEW_OPS = ("sum", "avg", "max", "lor")


@dataclass(frozen=True)
class Comparison:
    """Comparison to make.

    Attributes:
        transports: transports to use.
        frameworks: frameworks of the arrays; ``"mixed"`` gives each rank one of the frameworks on
            the host, in turn.
        operations, ops, dtypes, shapes: see :mod:`collective.tools.parity.cases`.
        sizes: numbers of ranks.
        seed: seed of the numbers.
        timeout: seconds that a call may take.
        all_ops: if true, all reductions are tried with every framework, not only the first.
    """

    transports: Sequence[Transport]
    frameworks: Sequence[str]
    operations: Sequence[str]
    ops: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[str]
    sizes: Sequence[int]
    seed: int = 0
    timeout: float = 20.0
    all_ops: bool = False

    def kinds(self, transport: Transport) -> dict[str, tuple[str, ...]]:
        """Return the kinds of arrays for a transport: name -> frameworks of the ranks, in turn."""
        kinds: dict[str, tuple[str, ...]] = {}
        for name in self.frameworks:
            if name != "mixed" and (transport.on_host or framework(name).on_gpu):
                kinds[name] = (name,)
        hosted = [name for name in kinds if not framework(name).on_gpu]
        if "mixed" in self.frameworks and len(hosted) > 1:
            kinds["mixed"] = tuple(hosted)
        return kinds

    def cases(self, transport: Transport) -> list[Case]:
        """Return the cases of one transport; cases that fold the same arrays are neighbours."""
        cases: list[Case] = []
        for number, names in enumerate(self.kinds(transport).values()):
            known = frozenset.intersection(*(framework(name).dtypes() for name in names))
            dtypes = [dtype for dtype in self.dtypes if dtype in known]
            few = number > 0 and not self.all_ops
            ops = [op for op in self.ops if op in _FEW_OPS or not few]
            cases += matrix(self.operations, ops, dtypes, self.shapes, names, self.seed)
        nth = {dtype: index for index, dtype in enumerate(self.dtypes)}
        cases.sort(key=lambda case: (nth[case.dtype], case.shape_class, case.op))
        return cases


@dataclass(frozen=True, kw_only=True)
class CaseResult(Verdict):
    """Outcome of one case on all ranks; see :class:`~.execution.Verdict`.

    Attributes:
        transport, size: name of the transport, and number of ranks.
        case: the case.
    """

    transport: str
    size: int
    case: Case


class CaseRunner:
    """Runner of cases on the ranks of one transport and size. A context manager.

    Args:
        transport, size, timeout: as in :class:`Comparison`.
        frameworks: frameworks that the ranks import first.

    Raises:
        BackendUnavailableError: the transport cannot be used here.
    """

    def __init__(
        self, transport: Transport, size: int, frameworks: Sequence[str], timeout: float
    ) -> None:
        self._transport, self._size, self._timeout = transport, size, timeout
        self._frameworks = list(frameworks)
        self._factory = RankFactory(transport.backend)
        self._prepared = False
        self._after_failure = False
        self._unstarted = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._factory.close()

    def run(self, case: Case) -> CaseResult:
        """Run a case, and return its outcome."""
        if not self._prepared and not self._unstarted:
            self._prepare()
        if self._unstarted:
            verdict = Verdict("failed", text=self._unstarted)
        else:
            verdict = self._verdict(case)
        # A failure may have left the communicator unusable, so the next case gets a new one.
        self._after_failure = verdict.status == "failed"
        name, size = self._transport.name, self._size
        return CaseResult(**vars(verdict), transport=name, size=size, case=case)

    def _prepare(self) -> None:
        """Start the ranks that are missing, and let all ranks import their frameworks."""
        self._factory.timeout = _PREPARE_S
        try:
            self._factory.run(self._size, execution.prepare, self._frameworks)
        except RanksFailedError as failure:
            self._unstarted = f"{self._size} ranks did not start: {failure}"
        self._factory.timeout = _JOB_SHARE * self._timeout
        self._prepared = True

    def _verdict(self, case: Case) -> Verdict:
        try:
            verdicts = self._factory.run(
                self._size,
                execution.run_case,
                case,
                call_timeout=self._timeout,
                fresh=self._after_failure,
            )
            return _worst(verdicts)
        except RanksFailedError as failure:
            self._prepared = False  # ranks that died or hung are replaced
            cause = failure.cause
            text = f"{case.title()}: {type(cause).__name__}: {cause}\n{failure}"
            return Verdict("failed", float("inf"), text=text)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the outcome of all ranks together."""
    failed = [verdict for verdict in verdicts if verdict.status == "failed"]
    if failed:
        return failed[0]
    refused = [verdict for verdict in verdicts if verdict.status == "unsupported"]
    if refused and len(refused) < len(verdicts):
        return Verdict("failed", text=f"some ranks refuse, others do not: {refused[0].text}")
    if refused:
        return refused[0]
    return max(verdicts, key=lambda v: v.error / v.bound if v.bound else 0.0)


def run(
    plan: Comparison, report: Callable[[CaseResult], None], note: Callable[[Transport, int], None]
) -> Comparison:
    """Make a comparison.

    Args:
        report: called with each outcome.
        note: called before ranks are started, with their transport and number.

    Returns:
        The plan; transports whose ranks cannot be started have the ``reason`` in it.
    """
    transports = []
    for transport in plan.transports:
        if not transport.reason:
            try:
                _run_over(transport, plan, report, note)
            except BackendUnavailableError as error:
                transport = replace(transport, reason=str(error))
        transports.append(transport)
    return replace(plan, transports=transports)


def _run_over(
    transport: Transport,
    plan: Comparison,
    report: Callable[[CaseResult], None],
    note: Callable[[Transport, int], None],
) -> None:
    cases = plan.cases(transport)
    imported = [name for names in plan.kinds(transport).values() for name in names]
    for size in plan.sizes:
        note(transport, size)
        with CaseRunner(transport, size, list(dict.fromkeys(imported)), plan.timeout) as ranks:
            for case in cases:
                report(ranks.run(case))


def on_ranks(
    plan: Comparison,
    what: str,
    say: Callable[[str], None],
    rows: list[dict[str, Any]],
    function: Callable[..., Any],
    *arguments: Any,
) -> Iterator[tuple[str, int, list[Any]]]:
    """Call a function on the ranks of every usable transport, with every number of ranks.

    One rank is also tried. It sends nothing, so one transport does.

    Args:
        plan: the transports and the numbers of ranks.
        what: name of the computation.
        say: called with a text about the current computation.
        rows: gets a row that has not passed for each group of ranks that failed.
        function: function of the communicator and ``arguments``.

    Yields:
        Name of the transport, number of ranks, and the ranks' results.
    """
    usable = [each for each in plan.transports if not each.reason and each.on_host]
    for number, transport in enumerate(usable):
        for size in sorted({*plan.sizes} | ({1} if number == 0 else set())):
            say(f"{what}: {transport.name}, {size} ranks")
            try:
                with RankPool(size, transport.backend, timeout=_JOB_S) as pool:
                    found = pool.run(function, *arguments)
            except RanksFailedError as failure:
                text = f"{type(failure.cause).__name__}: {failure.cause}"[-_TEXT:]
                where = f"{what} over {transport.name} on {size} ranks"
                rows.append(row(where, None, None, False, text))
                continue
            yield transport.name, size, found


def row(
    what: str, difference: float | None, allowed: float | None, passed: bool, text: str = ""
) -> dict[str, Any]:
    """Return a row of the report: what has to agree, by how much it may differ, and the result.

    Args:
        difference, allowed: largest difference and its limit; None if there is no such figure.
        text: text in place of the difference.
    """
    found = {"what": what, "difference": difference, "allowed": allowed, "passed": bool(passed)}
    return found | ({"text": text} if text else {})
