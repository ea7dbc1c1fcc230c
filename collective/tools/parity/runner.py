"""Runs cases on ranks that are started once for many, and goes on when one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from collective.errors import BackendUnavailableError
from collective.testing import RankPool, RanksFailedError
from collective.testing.frameworks import framework

from . import execution
from .cases import CONDUCT, Case, CaseLeaf, matrix
from .execution import Verdict
from .transports import Transport

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CaseResult", "CaseRunner", "Comparison", "run"]

# Cases that are sent to the ranks at once.
_BATCH = 100
# What ranks may need to import their frameworks on a busy machine.
_PREPARE_S = 120.0
# A job may take so many times what a call may: then its ranks hang.
_JOB_SHARE = 2.0
# Reductions that the frameworks after the first are tried with: each dtype has one of them, and
# how arrays come and go does not depend on the reduction.
_FEW_OPS = ("sum", "avg", "max", "lor")


@dataclass(frozen=True)
class Comparison:
    """What is to be compared.

    Attributes:
        transports: over which.
        frameworks: whose arrays; ``"mixed"`` for one a rank, of those on the host in turn.
        operations, ops, dtypes, shapes: of which; see :mod:`collective.tools.parity.cases`.
        sizes: numbers of ranks.
        seed: of the numbers.
        timeout: seconds that a call may take.
        all_ops: whether every framework is tried with all reductions, not the first alone.
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
        """Return the frameworks that are tried on a transport: a name each, and who has what."""
        kinds: dict[str, tuple[str, ...]] = {}
        for name in self.frameworks:
            if name != "mixed" and (transport.on_host or framework(name).on_gpu):
                kinds[name] = (name,)
        hosted = [name for name in kinds if not framework(name).on_gpu]
        if "mixed" in self.frameworks and len(hosted) > 1:
            kinds["mixed"] = tuple(hosted)
        return kinds

    def cases(self, transport: Transport) -> list[Case]:
        """Return the cases of one transport, those that fold the same arrays side by side."""
        found: list[Case] = []
        for number, names in enumerate(self.kinds(transport).values()):
            known = frozenset.intersection(*(framework(name).dtypes() for name in names))
            dtypes = [dtype for dtype in self.dtypes if dtype in known]
            few = number > 0 and not self.all_ops
            ops = [op for op in self.ops if op in _FEW_OPS or not few]
            found += matrix(self.operations, ops, dtypes, self.shapes, names, self.seed)
        nth = {dtype: index for index, dtype in enumerate(self.dtypes)}
        found.sort(key=lambda case: (nth[case.dtype], case.shape_class, case.op))
        conduct = [name for name in self.operations if name in CONDUCT]
        if transport.on_host and "numpy" in self.frameworks:
            found += [Case(name, CaseLeaf((1,)), shape_class="") for name in conduct]
        return found


@dataclass(frozen=True)
class CaseResult:
    """How one case went on one transport with one number of ranks.

    Attributes:
        status: ``"passed"``, ``"failed"``, ``"unsupported"``.
        error, bound: the largest error of any rank in units in the last place, and how large
            it may be.
        text: what is wrong, or why it is not supported.
    """

    transport: str
    size: int
    case: Case
    status: str
    error: float = 0.0
    bound: float = 0.0
    text: str = ""


@dataclass
class CaseRunner:
    """Runs cases on the ranks of one transport and size: a context manager.

    Attributes:
        transport, size, timeout: as in :class:`Comparison`.
        frameworks: that they import first.
    """

    transport: Transport
    size: int
    frameworks: Sequence[str]
    timeout: float
    _pool: RankPool | None = field(default=None, repr=False)
    _fresh: bool = field(default=True, repr=False)
    _prepared: bool = field(default=False, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def start(self) -> RankPool:
        """Start the ranks that are not there.

        Raises:
            RanksFailedError: they cannot connect, or a framework cannot be imported there.
        """
        if self._pool is None:
            self._pool = RankPool(self.size, self.transport.backend, timeout=self.timeout)
        if not self._prepared:
            self._pool.run(execution.prepare, list(self.frameworks), timeout=_PREPARE_S)
            self._prepared = True
        return self._pool

    def run(self, cases: Sequence[Case]) -> Iterator[CaseResult]:
        """Run cases, and yield how each went, in their order but where ranks died."""
        left = list(cases)
        while left:
            try:
                self.start()
            except RanksFailedError as failure:
                text = f"{self.size} ranks do not start: {failure}"
                yield from (self._outcome(case, Verdict("failed", text=text)) for case in left)
                return
            outcomes, left = self._attempt(left)
            yield from outcomes

    def _attempt(self, cases: list[Case]) -> tuple[list[CaseResult], list[Case]]:
        """Run cases until ranks have to connect anew; return the outcomes, and what is left."""
        pool = self.start()
        # The communicator of an interrupted batch is not used again.
        shared, self._fresh = not self._fresh, False
        try:
            verdicts = pool.run(
                execution.run_cases,
                cases,
                timeout=_JOB_SHARE * self.timeout,
                call_timeout=self.timeout,
                shared=shared,
            )
        except RanksFailedError as failure:
            return self._after(failure, cases)
        outcomes, left = self._together(cases, dict(enumerate(verdicts)))
        # Whatever went wrong may have left the communicator unusable.
        wrong = any(outcome.status == "failed" for outcome in outcomes)
        self._fresh = wrong or bool(left) or any(len(found) < len(cases) for found in verdicts)
        return outcomes, left

    def _after(
        self, failure: RanksFailedError, cases: list[Case]
    ) -> tuple[list[CaseResult], list[Case]]:
        """Find out in which case a rank died or hung; run the others again."""
        # The pool replaces who died or hung.
        self._prepared, self._fresh = False, True
        if len(cases) == 1:
            cause = failure.cause
            text = f"{cases[0].title()}: {type(cause).__name__}: {cause}"
            return [self._outcome(cases[0], Verdict("failed", float("inf"), text=text))], []
        found = [verdicts for verdicts in failure.results.values() if verdicts]
        # The survivors were interrupted in the case that it was, or in the next.
        guess = min((len(verdicts) - 1 for verdicts in found), default=len(cases) // 2)
        before, suspect, behind = cases[:guess], cases[guess : guess + 1], cases[guess + 1 :]
        outcomes = [each for part in (suspect, before) for each in self.run(part)]
        return outcomes, behind

    def _together(
        self, cases: Sequence[Case], verdicts: Mapping[int, Sequence[Verdict]]
    ) -> tuple[list[CaseResult], list[Case]]:
        """Return one outcome a case, up to the one that left the communicator unusable."""
        outcomes: list[CaseResult] = []
        for number, case in enumerate(cases):
            heard = [found[number] for found in verdicts.values() if len(found) > number]
            if not heard and not any(found[-1].status == "failed" for found in verdicts.values()):
                return outcomes, list(cases[number:])  # the one before was meant to be the last
            gone = len(heard) < len(verdicts)
            if not gone and not any(each.status == "interrupted" for each in heard):
                outcomes.append(self._outcome(case, _worst(heard)))
                continue
            if any(len(found) <= number and found[-1].status == "failed"
                   for found in verdicts.values()):  # fmt: skip
                return outcomes, list(cases[number:])  # what broke it was a case before
            failed = [each for each in heard if each.status == "failed"] or heard
            outcomes.append(
                self._outcome(case, Verdict("failed", float("inf"), text=failed[0].text))
            )
            return outcomes, list(cases[number + 1 :])
        return outcomes, []

    def _outcome(self, case: Case, verdict: Verdict) -> CaseResult:
        return CaseResult(
            self.transport.name, self.size, case, verdict.status, verdict.error, verdict.bound,
            verdict.text,
        )  # fmt: skip


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what the ranks' verdicts come to together."""
    failed = [each for each in verdicts if each.status == "failed"]
    if failed:
        return failed[0]
    refused = [each for each in verdicts if each.status == "unsupported"]
    if refused and len(refused) < len(verdicts):
        return Verdict("failed", text=f"some ranks refuse, others do not: {refused[0].text}")
    if refused:
        return refused[0]
    return max(verdicts, key=lambda each: each.error / each.bound if each.bound else 0.0)


def run(
    plan: Comparison, report: Callable[[CaseResult], None], note: Callable[[Transport, int], None]
) -> Comparison:
    """Run a plan.

    Args:
        report: called with each outcome.
        note: called before ranks are started, with their transport and number.

    Returns:
        The plan, in which transports whose ranks cannot be started say why.
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
            for start in range(0, len(cases), _BATCH):
                for outcome in ranks.run(cases[start : start + _BATCH]):
                    report(outcome)
