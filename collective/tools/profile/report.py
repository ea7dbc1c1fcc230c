"""A profile as tables for a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from collective.algorithms.model import ALGORITHMS

from .measure import Operation, Profile, StepTimes
from .predict import Outlook
from .verdict import Verdict, judge

__all__ = ["as_json", "show"]


def as_json(found: Profile, outlook: Outlook | None) -> dict[str, Any]:
    """Return everything that was found as plain data, in seconds and bytes."""
    told: dict[str, Any] = dataclasses.asdict(found)
    for one, operation in zip(told["operations"], found.operations):
        one |= {"algbw": operation.algbw, "busbw": operation.busbw}
        one["late"] = {str(rank): count for rank, count in operation.late.items()}
    told["verdict"] = None
    if found.steps is not None:
        told["verdict"] = dataclasses.asdict(judge(found.steps, found.ranks))
        if math.isinf(told["verdict"]["ratio"]):
            told["verdict"]["ratio"] = None
    told["prediction"] = None
    if outlook is not None:
        told["prediction"] = dataclasses.asdict(outlook)
        for one, fitted in zip(told["prediction"]["fits"], outlook.fits):
            one |= {"typical": fitted.typical, "worst": fitted.worst}
            one["errors"] = fitted.errors.tolist()
            del one["drawn"]
    return told


def show(console: Console, found: Profile, outlook: Outlook | None) -> None:
    """Print what was found."""
    about = found.about
    console.print(
        f"[bold]{found.ranks} rank(s) over {about['backend']}[/], {found.seconds:.2f} s traced"
    )
    if found.operations:
        console.print(_operations(found.operations))
    for note in _notes(found):
        console.print(f"[dim]- {note}[/]")
    if found.steps is None:
        console.print(
            "\nNo training steps found: too few calls, or none that repeat. Call "
            "collective.profile.step() once a step."
        )
        return
    _show_steps(console, found.steps, judge(found.steps, found.ranks))
    if outlook is not None:
        _show_outlook(console, outlook)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _operations(operations: Iterable[Operation]) -> Table:
    table = _table(
        "Calls",
        "operation", "calls", "bytes", "time", "mean", "waiting", "algbw", "busbw",
        "hidden", "late",
    )  # fmt: skip
    for one in operations:
        late = ""
        if one.late and sum(one.late.values()) > 1:
            rank, times = one.late.most_common(1)[0]
            late = f"rank {rank}: {times / sum(one.late.values()):.0%}"
        waiting = one.waiting / (one.waiting + one.moving) if one.waiting + one.moving else None
        table.add_row(
            one.name,
            f"{one.calls:,}",
            _bytes(one.nbytes / one.calls),
            _time(one.seconds),
            _time(one.seconds / one.calls),
            "-" if waiting is None else f"{waiting:.0%}",
            _rate(one.algbw),
            _rate(one.busbw),
            f"{one.hidden / one.background:.0%}" if one.background > 0 else "-",
            late or "-",
        )
    return table


def _notes(found: Profile) -> Iterable[str]:
    yield (
        "bytes, mean: of a call; time: of the slowest rank; waiting: the share before the last "
        "rank had come, the mean of the ranks; algbw, busbw: once all had; hidden: the share of "
        "calls in the background while the program computed; late: who came last most often"
    )
    if found.about.get("enqueues"):
        yield (
            "calls on GPUs are only enqueued: these are times of the host, and say nothing of "
            "how long the GPU took"
        )
    if found.clock_error:
        yield f"the ranks' clocks may be {_time(found.clock_error)} apart: so may be the waiting"
    failed = {one.name: one.failed for one in found.operations if one.failed}
    if failed:
        told = ", ".join(f"{count} {name}" for name, count in failed.items())
        yield f"calls that failed or never ended: {told}"
    missing = int(found.about["size"]) - found.ranks
    if missing > 0:
        yield f"{missing} of {found.about['size']} ranks left no trace"
    local, cores = int(found.about["local_size"]), int(found.about.get("cores", 0))
    if cores and local > cores:
        yield (
            f"{local} ranks share {cores} core(s): T_comp holds their waiting for a core, and "
            "one rank alone would be faster than it says"
        )


def _show_steps(console: Console, steps: StepTimes, verdict: Verdict) -> None:
    spread = ""
    if len(steps.comp_by_rank) > 1:
        spread = f" ({_time(min(steps.comp_by_rank))} to {_time(max(steps.comp_by_rank))})"
    console.print(f"\n{steps.count} steps, by {steps.how}; medians, means of the ranks:")
    console.print(f"T_comp     {_time(steps.comp)} computing{spread}")
    console.print(
        f"T_sync     {_time(steps.sync)} in calls, {_time(steps.waiting)} of it waiting for "
        "late ranks"
    )
    if steps.background > 0:
        console.print(
            f"hidden     {_time(steps.hidden)} of {_time(steps.background)} of calls in the "
            f"background ({steps.hidden / steps.background:.0%})"
        )
    if steps.guessed:
        console.print(
            "[dim]- the steps are a guess: where one makes this call more than once, mark them "
            "with collective.profile.step()[/]"
        )
    bound = verdict.ranks - 1
    if bound == 0:
        console.print("criterion  one rank: nothing to weigh against computing")
        return
    sign = "<" if verdict.pays else ">="
    console.print(
        f"criterion  T_sync / T_comp = {verdict.ratio:.3g} {sign} R - 1 = {bound}: "
        f"{verdict.ranks} ranks {'pay' if verdict.pays else 'do not pay'}; "
        f"{verdict.speedup:.2f} x one rank, {verdict.efficiency:.0%} of {verdict.ranks}"
    )
    console.print(
        f"more       {2 * verdict.ranks} ranks are faster than {verdict.ranks} as long as their "
        f"T_sync stays below {_time(verdict.doubled_limit)}"
    )


def _show_outlook(console: Console, outlook: Outlook) -> None:
    fits = _table(
        "\nModel, fitted to the transport", "all-reduce by", "alpha", "1/beta", "1/gamma",
        "typical error", "worst", "R²",
    )  # fmt: skip
    for one in outlook.fits:
        gamma = _rate(1 / one.gamma) if one.gamma else ("0" if one.separate else "in beta")
        fits.add_row(
            one.algorithm,
            _time(one.link.alpha),
            _rate(1 / one.link.beta) if one.link.beta else "-",
            gamma,
            f"{one.typical:.0%}",
            f"{one.worst:+.0%}",
            f"{one.r2:.3f}",
        )
    console.print(fits)
    by_algorithm = _table("\nThe calls of a step, predicted", "ranks", *ALGORITHMS)
    table = _table(
        "\nA step with the fastest of these, predicted", "ranks", "calls, 90 %", "T_sync",
        "speed-up", "efficiency", "pays",
    )  # fmt: skip
    for found in outlook.predictions:
        times = {one.algorithm: _time(one.moving) for one in found}
        fastest = found[0]
        ranks = f"{fastest.ranks:,}"
        by_algorithm.add_row(ranks, *(times[name] for name in ALGORITHMS))
        table.add_row(
            ranks,
            f"{_time(fastest.low)} to {_time(fastest.high)}",
            _time(fastest.sync),
            f"{fastest.speedup:,.1f} x",
            f"{fastest.speedup / fastest.ranks:.0%}",
            "yes" if fastest.speedup > 1 else "no",
        )
    console.print(by_algorithm)
    console.print(table)
    for note in _assumptions(outlook):
        console.print(f"[dim]- {note}[/]")


def _assumptions(outlook: Outlook) -> Iterable[str]:
    counts = ", ".join(map(str, outlook.rank_counts))
    yield (
        f"fitted to {outlook.measured} measurements with {counts} ranks on one host; for more "
        "ranks this is a model and not a measurement, and the interval holds the fit's error only"
    )
    if outlook.here > 0:
        yield (
            f"for the ranks that there were, the model says {_time(outlook.here)} for a step's "
            f"calls, measured {_time(outlook.moved_here)}"
            + "; the difference stays in every T_sync"
            * (outlook.excess > 0)
        )
    if outlook.far is None:
        yield (
            "every two ranks are taken to be connected as those of this host: give --link "
            "(10us,12GB/s) and --per-host for several hosts"
        )
    else:
        yield (
            f"{outlook.per_host} rank(s) a host, which share a connection of "
            f"{_time(outlook.far.alpha)} and {_rate(1 / outlook.far.beta)}, without contention "
            "between hosts"
        )
    yield (
        "each rank computes a step as now (its mini-batch stays: the whole batch grows), waits "
        "for late ranks as now, and hides the share of its calls that it hides now while there "
        "is time to compute; speed-up is over one rank"
    )
    if outlook.left_out:
        yield f"calls that the model does not know, left out: {', '.join(outlook.left_out)}"


# -- units --------------------------------------------------------------------------------------


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.0f} ns" if seconds > 0 else "0"


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g} B/s"
