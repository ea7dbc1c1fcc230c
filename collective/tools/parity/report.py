"""The results of a run: as plain data, and as tables in a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

import collective
from collective.inner import BY_NAME
from collective.tools.bench.machine import headline
from collective.tools.show import Console

from .cases import OPERATIONS, REDUCTIONS
from .runner import CaseResult, Comparison

# Number of failures that are printed; a file has all of them.
_SHOWN = 12
_WIDTH = 600


@dataclass
class Report:
    """Collector of the results of a run.

    Attributes:
        plan: the comparison.
        missing: frameworks that cannot be used here, and why.
    """

    plan: Comparison
    missing: Mapping[str, str]
    failures: list[CaseResult] = field(default_factory=list)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)
    training: list[dict[str, Any]] = field(default_factory=list)
    _rows: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def add(self, outcome: CaseResult) -> None:
        """Count one outcome."""
        case = outcome.case
        reduction = case.op if case.operation in REDUCTIONS else ""
        key = (
            outcome.transport, case.framework, outcome.size, case.operation, reduction,
            case.order or "", case.dtype,
        )  # fmt: skip
        names = ("transport", "framework", "ranks", "operation", "op", "order", "dtype")
        row = self._rows.setdefault(
            key,
            dict(zip(names, key)) | {"passed": 0, "unsupported": 0, "failed": 0}
            | {"worst_ulp": 0.0, "bound_ulp": outcome.bound},
        )  # fmt: skip
        row[outcome.status] += 1
        if outcome.status == "failed":
            self.failures.append(outcome)
        else:
            row["worst_ulp"] = max(row["worst_ulp"], outcome.error)
            row["bound_ulp"] = max(row["bound_ulp"], outcome.bound)
        if outcome.status == "unsupported":
            self.refusals[outcome.transport, _general(outcome.text)] += 1

    @property
    def failed(self) -> bool:
        """Whether a case or a comparison failed."""
        return bool(self.failures) or not all(result["passed"] for result in self.training)

    def as_data(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """Return all results, and the machine of the run, as data for JSON."""
        plan = self.plan
        return {
            "collective": collective.__version__,
            "machine": machine,
            "versions": _versions(plan.frameworks),
            "seed": plan.seed,
            "ranks": list(plan.sizes),
            "frameworks": [
                {"name": name, "available": not self.missing.get(name),
                 "reason": self.missing.get(name, "")}
                for name in (*plan.frameworks, *self.missing)
            ],
            "transports": [
                {"name": each.name, "available": not each.reason, "reason": each.reason,
                 "fix": each.fix}
                for each in plan.transports
            ],
            "results": list(self._rows.values()),
            "failures": [
                {"transport": each.transport, "ranks": each.size, "case": each.case.title(),
                 "text": each.text}
                for each in self.failures
            ],
            "unsupported": [
                {"transport": transport, "count": count, "text": text}
                for (transport, text), count in self.refusals.items()
            ],
            "training": self.training,
            "exit_code": int(self.failed),
        }  # fmt: skip


def _general(text: str) -> str:
    """Return the text of a refusal without the rank in it."""
    return re.sub(r" ?\[rank [^]]*\]", "", text).strip()


def _versions(frameworks: Sequence[str]) -> dict[str, str]:
    found = {"numpy": np.__version__}
    for name in {name.partition(".")[0] for name in frameworks} - {"numpy", "mixed", "cuda"}:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# -- cells of the tables --------------------------------------------------------------------------


class Cell(NamedTuple):
    """Sum of some rows of the results.

    Attributes:
        worst, bound: the error that is the largest share of its bound, over the rows with rounded
            results, and that bound, in units in the last place.
    """

    passed: int
    unsupported: int
    failed: int
    worst: float
    bound: float


def cell(data: Mapping[str, Any], **wanted: Any) -> Cell | None:
    """Return the sum of the rows with the ``wanted`` values; None if there are no such rows."""
    rows = [
        row for row in data["results"] if all(row[key] == value for key, value in wanted.items())
    ]
    if not rows:
        return None
    rounding = [row for row in rows if row["bound_ulp"]]
    worst = max(rounding, key=lambda row: row["worst_ulp"] / row["bound_ulp"], default=None)
    passed, unsupported, failed = (
        sum(row[key] for row in rows) for key in ("passed", "unsupported", "failed")
    )
    of_worst = (worst["worst_ulp"], worst["bound_ulp"]) if worst else (0.0, 0.0)
    return Cell(passed, unsupported, failed, *of_worst)


def show(out: Console, data: Mapping[str, Any]) -> None:
    """Print the tables and the failures.

    Args:
        out: the output.
        data: data of :meth:`Report.as_data`.
    """
    _show_matrix(out, data)
    _show_errors(out, data)
    _show_training(out, data["training"])
    _show_missing(out, data)
    for failure in data["failures"][:_SHOWN]:
        text = failure["text"].strip()[:_WIDTH]
        out.quote(f"FAILED {failure['transport']}, {failure['ranks']} ranks: {text}")
    more = len(data["failures"]) - _SHOWN
    if more > 0:
        out.say(f"and {more} more failures; --json writes all of them")
    everything = cell(data)
    if everything is not None:
        out.say(
            f"{everything.passed:,} passed, {everything.failed:,} failed, "
            f"{everything.unsupported:,} unsupported (declared); seed {data['seed']}, "
            f"{data['machine']['seconds']:.1f} s"
        )
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    out.say(f"collective {data['collective']}, {versions}; {headline(data['machine'])}")


def _show_matrix(out: Console, data: Mapping[str, Any]) -> None:
    for transport in (each["name"] for each in data["transports"]):
        frameworks = {row["framework"] for row in data["results"] if row["transport"] == transport}
        if not frameworks:
            continue
        names = [each["name"] for each in data["frameworks"] if each["name"] in frameworks]
        rows = []
        for operation in OPERATIONS:
            cells = [
                cell(data, transport=transport, framework=name, operation=operation)
                for name in names
            ]
            if any(cells):
                rows.append([operation, *map(_shown, cells)])
        title = f"{transport}: cases passed, and the largest error as a share of its bound"
        out.table(title, ["operation", *names], rows)


def _shown(found: Cell | None) -> str:
    if found is None:
        return "–"
    parts = [f"{found.passed}" if found.passed else ""]
    parts += [f"{found.failed} FAILED"] if found.failed else []
    parts += [f"{found.unsupported} unsupported"] if found.unsupported else []
    parts += [f"{found.worst / found.bound:4.0%}"] if found.bound else []
    return " ".join(filter(None, parts))


def _show_errors(out: Console, data: Mapping[str, Any]) -> None:
    """Print the largest errors of rounded results by op, dtype and number of ranks."""
    dtypes = list(BY_NAME)
    rounding = {(row["op"], row["dtype"]) for row in data["results"] if row["bound_ulp"]}
    rows = []
    for op, dtype in sorted(rounding, key=lambda pair: (pair[0], dtypes.index(pair[1]))):
        cells = [cell(data, op=op, dtype=dtype, order="", ranks=ranks) for ranks in data["ranks"]]
        errors = ["–" if c is None else f"{c.worst:.2f} / {c.bound:.2f}" for c in cells]
        rows.append([f"{op} {dtype}", *errors])
    if rows:
        ranks = [f"{n} ranks" if n > 1 else "1 rank" for n in data["ranks"]]
        title = "Largest error / bound, in units in the last place"
        out.table(title, ["op, dtype", *ranks], rows)


def _show_training(out: Console, found: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for each in found:
        difference = each["difference"]
        text = each.get("text") or ("–" if difference is None else f"{difference:.2g}")
        allowed = f"{each['allowed']:.0e}" if each["allowed"] else "same bits"
        rows.append([each["what"], text, allowed, "passed" if each["passed"] else "FAILED"])
    if rows:
        header = ["what has to agree", "largest difference", "allowed", ""]
        out.table("Training", header, rows)


def _show_missing(out: Console, data: Mapping[str, Any]) -> None:
    for kind in ("transports", "frameworks"):
        for each in data[kind]:
            if not each["available"]:
                fix = f"; {each['fix']}" if each.get("fix") else ""
                out.quote(f"not here: {each['name']}: {each['reason']}{fix}")
    for each in data["unsupported"]:
        out.quote(
            f"unsupported by {each['transport']}, {each['count']} cases: {each['text']}"[:_WIDTH]
        )
