"""The results of a run: as plain data, and as tables in a terminal."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

import collective
from collective.memory.dtypes import BY_NAME
from collective.tools.doctor import host
from collective.tools.show import Output, escape, table

from .cases import CONDUCT, OPERATIONS, REDUCTIONS
from .runner import CaseResult, Comparison

__all__ = ["Cell", "Report", "cell", "columns", "show", "worst_by_dtype"]

# Number of failures that are printed in a terminal; a file has all of them.
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
    random: list[dict[str, Any]] = field(default_factory=list)
    training: list[dict[str, Any]] = field(default_factory=list)
    splits: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    _rows: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def add(self, outcome: CaseResult) -> None:
        """Count one outcome."""
        case = outcome.case
        reduction = case.op if case.operation in REDUCTIONS else ""
        key = (
            outcome.transport, case.framework, outcome.size, case.operation, reduction,
            case.order or "", "" if case.operation in CONDUCT else case.dtype,
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
        wrong = [
            result
            for result in (*self.random, *self.training, *self.splits)
            if not result["passed"]
        ]
        return bool(self.failures or wrong)

    def as_data(self) -> dict[str, Any]:
        """Return all results as data for JSON."""
        plan = self.plan
        return {
            "collective": collective.__version__,
            "machine": _machine(),
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
            "random": self.random,
            "training": self.training,
            "splits": self.splits,
            "seconds": round(self.seconds, 1),
            "exit_code": int(self.failed),
        }  # fmt: skip


def _general(text: str) -> str:
    """Return the text of a refusal without the rank in it."""
    return re.sub(r" ?\[rank [^]]*\]", "", text).strip()


def _machine() -> dict[str, Any]:
    return {
        "system": host.system(),
        "processor": platform.machine(),
        "cores": host.processors()["usable"],
        "python": platform.python_version(),
    }


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
        share: largest error as a share of its bound, over the rows with rounded results.
        worst, bound: that error and its bound, in units in the last place.
    """

    passed: int
    unsupported: int
    failed: int
    share: float
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
    if worst is None:
        return Cell(passed, unsupported, failed, 0.0, 0.0, 0.0)
    share = worst["worst_ulp"] / worst["bound_ulp"]
    return Cell(passed, unsupported, failed, share, worst["worst_ulp"], worst["bound_ulp"])


def columns(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs of transport and framework that have results, in the order of the run."""
    known = {
        (row["transport"], row["framework"]) for row in data["results"]
        if row["operation"] not in CONDUCT
    }  # fmt: skip
    frameworks = [each["name"] for each in data["frameworks"]]
    return [
        (transport["name"], framework)
        for transport in data["transports"]
        for framework in frameworks
        if (transport["name"], framework) in known
    ]


def worst_by_dtype(data: Mapping[str, Any]) -> Iterable[tuple[str, str, list[Cell | None]]]:
    """Yield op, dtype and a cell for each number of ranks, for rounded results."""
    rounding = {(row["op"], row["dtype"]) for row in data["results"] if row["bound_ulp"]}
    for op, dtype in sorted(rounding, key=lambda pair: (pair[0], list(BY_NAME).index(pair[1]))):
        yield op, dtype, [
            cell(data, op=op, dtype=dtype, order="", ranks=ranks) for ranks in data["ranks"]
        ]  # fmt: skip


def show(console: Output, data: Mapping[str, Any]) -> None:
    """Print the tables and the failures."""
    _show_matrix(console, data)
    _show_errors(console, data)
    _show_random(console, data)
    _show_agreement(console, "Training", data["training"])
    _show_agreement(console, "Splits", data["splits"])
    _show_missing(console, data)
    for failure in data["failures"][:_SHOWN]:
        where = f"{failure['transport']}, {failure['ranks']} ranks"
        console.print(f"[red]FAILED[/] {where}: ", end="")
        console.print(failure["text"].strip()[:_WIDTH], markup=False, soft_wrap=True)
    more = len(data["failures"]) - _SHOWN
    if more > 0:
        console.print(f"[red]and {more} more failures[/]; --json or --html writes all of them")
    everything = cell(data)
    if everything is not None:
        tone = "red" if data["exit_code"] else "green"
        console.print(
            f"[{tone}]{everything.passed:,} passed, {everything.failed:,} failed[/], "
            f"{everything.unsupported:,} unsupported (declared); seed {data['seed']}, "
            f"{data['seconds']:g} s"
        )


def _show_matrix(console: Output, data: Mapping[str, Any]) -> None:
    pairs = columns(data)
    for transport in dict.fromkeys(name for name, _ in pairs):
        frameworks = [framework for name, framework in pairs if name == transport]
        rows = []
        for operation in OPERATIONS:
            cells = [
                cell(data, transport=transport, framework=name, operation=operation)
                for name in frameworks
            ]
            if any(cells):
                rows.append([operation, *map(_shown, cells)])
        title = f"{transport}: cases passed, and the largest error as a share of its bound"
        console.print(table(title, ["operation", *frameworks], rows))


def _shown(found: Cell | None) -> str:
    if found is None:
        return "[dim]–[/]"
    parts = [f"[green]{found.passed}[/]" if found.passed else ""]
    parts += [f"[red]{found.failed} FAILED[/]"] if found.failed else []
    parts += [f"[dim]{found.unsupported} unsupported[/]"] if found.unsupported else []
    parts += [f"{found.share:4.0%}"] if found.bound else []
    return " ".join(filter(None, parts))


def _show_errors(console: Output, data: Mapping[str, Any]) -> None:
    ranks = [f"{n} ranks" if n > 1 else "1 rank" for n in data["ranks"]]
    rows = []
    for op, dtype, cells in worst_by_dtype(data):
        errors = ["–" if c is None else f"{c.worst:.2f} / {c.bound:.2f}" for c in cells]
        rows.append([f"{op} {dtype}", *errors])
    if rows:
        title = "Largest error / bound, in units in the last place"
        console.print(table(title, ["op, dtype", *ranks], rows))


def _show_random(console: Output, data: Mapping[str, Any]) -> None:
    for found in data["random"]:
        if found["passed"]:
            console.print(
                f"{found['transport']}: {found['count']} random cases, seed {found['seed']}: passed"
            )
        else:
            console.print(f"[red]FAILED[/] {found['transport']}: {found['case']}")
            console.print(found["text"], markup=False, soft_wrap=True)
            console.print("The smallest case that fails:\n")
            console.print(found["snippet"], markup=False, soft_wrap=True)


def _show_agreement(console: Output, title: str, found: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for each in found:
        mark = "[green]passed[/]" if each["passed"] else "[red]FAILED[/]"
        difference = each["difference"]
        text = each.get("text") or ("–" if difference is None else f"{difference:.2g}")
        allowed = f"{each['allowed']:.0e}" if each["allowed"] else "same bits"
        rows.append([each["what"], escape(text), allowed, mark])
    if rows:
        header = ["what has to agree", "largest difference", "allowed", ""]
        console.print(table(title, header, rows))


def _show_missing(console: Output, data: Mapping[str, Any]) -> None:
    for kind in ("transports", "frameworks"):
        for each in data[kind]:
            if not each["available"]:
                fix = f"; {each['fix']}" if each.get("fix") else ""
                console.print(f"not here: {each['name']}: {each['reason']}{fix}", markup=False)
    for each in data["unsupported"]:
        console.print(
            f"unsupported by {each['transport']}, {each['count']} cases: {each['text']}"[:_WIDTH],
            markup=False,
        )
