"""Output of a profile: tables for a terminal, and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from collective.algorithms.model import ALGORITHMS
from collective.tools.show import Output, rate_name, size_name, table, time_name

from .measure import OperationCost, Profile, StepTimes
from .predict import Outlook, Payoff, judge

__all__ = ["as_json", "show"]


def as_json(found: Profile, outlook: Outlook | None) -> dict[str, Any]:
    """Return the profile and the predictions as plain data, in seconds and bytes."""
    plain: dict[str, Any] = dataclasses.asdict(found)
    for one, operation in zip(plain["operations"], found.operations):
        one |= {"algbw": operation.algbw, "busbw": operation.busbw}
        one["late"] = {str(rank): count for rank, count in operation.late.items()}
    plain["verdict"] = None
    if found.steps is not None:
        plain["verdict"] = dataclasses.asdict(judge(found.steps, found.ranks))
        if math.isinf(plain["verdict"]["ratio"]):
            plain["verdict"]["ratio"] = None
    plain["prediction"] = None
    if outlook is not None:
        plain["prediction"] = dataclasses.asdict(outlook)
        for one, fitted in zip(plain["prediction"]["fits"], outlook.fits):
            one |= {"typical": fitted.typical, "worst": fitted.worst}
            one["errors"] = fitted.errors.tolist()
            del one["drawn"]
    return plain


def show(console: Output, found: Profile, outlook: Outlook | None) -> None:
    """Print the profile and the predictions."""
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
            "\nNo training steps found: there are too few calls, or they do not repeat. Call "
            "collective.profile.step() once in each step."
        )
        return
    _show_steps(console, found.steps, judge(found.steps, found.ranks))
    if outlook is not None:
        _show_outlook(console, outlook)


def _operations(operations: Iterable[OperationCost]) -> object:
    header = ["operation", "calls", "bytes", "time", "mean", "waiting", "algbw", "busbw"]
    rows = []
    for one in operations:
        late = ""
        if one.late and sum(one.late.values()) > 1:
            rank, times = one.late.most_common(1)[0]
            late = f"rank {rank}: {times / sum(one.late.values()):.0%}"
        waiting = one.waiting / (one.waiting + one.moving) if one.waiting + one.moving else None
        rows.append(
            [
                one.name,
                f"{one.calls:,}",
                size_name(one.nbytes / one.calls),
                time_name(one.seconds),
                time_name(one.seconds / one.calls),
                "-" if waiting is None else f"{waiting:.0%}",
                rate_name(one.algbw),
                rate_name(one.busbw),
                f"{one.hidden / one.background:.0%}" if one.background > 0 else "-",
                late or "-",
            ]
        )
    return table("Calls", [*header, "hidden", "late"], rows)


def _notes(found: Profile) -> Iterable[str]:
    yield (
        "bytes, mean: for one call; time: of the slowest rank; waiting: share of the time before "
        "the last rank had come, mean of the ranks; algbw, busbw: once all ranks had come; hidden: "
        "share of calls in the background during which the program computed; late: rank that came "
        "last most often"
    )
    if found.about.get("enqueues"):
        yield (
            "calls on GPUs are only enqueued: these are times on the host, which do not show how "
            "long the GPU took"
        )
    if found.clock_error:
        apart = time_name(found.clock_error)
        yield f"the ranks' clocks may be {apart} apart, and the waiting may be wrong by as much"
    failed = {one.name: one.failed for one in found.operations if one.failed}
    if failed:
        listed = ", ".join(f"{count} {name}" for name, count in failed.items())
        yield f"calls that failed or did not end: {listed}"
    missing = int(found.about["size"]) - found.ranks
    if missing > 0:
        yield f"{missing} of {found.about['size']} ranks left no trace"
    local, cores = int(found.about["local_size"]), int(found.about.get("cores", 0))
    if cores and local > cores:
        yield (
            f"{local} ranks share {cores} core(s): T_comp includes their waiting for a core, and "
            "one rank alone would be faster than it shows"
        )


def _show_steps(console: Output, steps: StepTimes, verdict: Payoff) -> None:
    spread = ""
    if len(steps.comp_by_rank) > 1:
        spread = f" ({time_name(min(steps.comp_by_rank))} to {time_name(max(steps.comp_by_rank))})"
    console.print(f"\n{steps.count} steps, by {steps.how}; medians, means of the ranks:")
    console.print(f"T_comp     {time_name(steps.comp)} computing{spread}")
    console.print(
        f"T_sync     {time_name(steps.sync)} in calls, {time_name(steps.waiting)} of it waiting "
        "for late ranks"
    )
    if steps.background > 0:
        console.print(
            f"hidden     {time_name(steps.hidden)} of {time_name(steps.background)} of calls in "
            f"the background ({steps.hidden / steps.background:.0%})"
        )
    if steps.guessed:
        console.print(
            "[dim]- the steps are a guess: if a step makes this call more than once, mark the "
            "steps with collective.profile.step()[/]"
        )
    bound = verdict.ranks - 1
    if bound == 0:
        console.print("criterion  one rank: there is no communication to weigh against computing")
        return
    sign = "<" if verdict.pays else ">="
    console.print(
        f"criterion  T_sync / T_comp = {verdict.ratio:.3g} {sign} R - 1 = {bound}: "
        f"{verdict.ranks} ranks {'pay' if verdict.pays else 'do not pay'}; "
        f"{verdict.speedup:.2f} x one rank, {verdict.efficiency:.0%} of {verdict.ranks}"
    )
    console.print(
        f"more       {2 * verdict.ranks} ranks are faster than {verdict.ranks} as long as their "
        f"T_sync stays below {time_name(verdict.doubled_limit)}"
    )


def _show_outlook(console: Output, outlook: Outlook) -> None:
    rows = []
    for one in outlook.fits:
        gamma = rate_name(1 / one.gamma) if one.gamma else ("0" if one.separate else "in beta")
        rows.append(
            [
                one.algorithm,
                time_name(one.link.alpha),
                rate_name(1 / one.link.beta) if one.link.beta else "-",
                gamma,
                f"{one.typical:.0%}",
                f"{one.worst:+.0%}",
                f"{one.r2:.3f}",
            ]
        )
    header = ["all-reduce by", "alpha", "1/beta", "1/gamma", "typical error", "worst", "R²"]
    console.print(table("\nModel, fitted to the transport", header, rows))
    by_algorithm, steps = [], []
    for found in outlook.predictions:
        times = {one.algorithm: time_name(one.moving) for one in found}
        fastest = found[0]
        ranks = f"{fastest.ranks:,}"
        by_algorithm.append([ranks, *(times[name] for name in ALGORITHMS)])
        steps.append(
            [
                ranks,
                f"{time_name(fastest.low)} to {time_name(fastest.high)}",
                time_name(fastest.sync),
                f"{fastest.speedup:,.1f} x",
                f"{fastest.speedup / fastest.ranks:.0%}",
                "yes" if fastest.speedup > 1 else "no",
            ]
        )
    console.print(table("\nThe calls of a step, predicted", ["ranks", *ALGORITHMS], by_algorithm))
    header = ["ranks", "calls, 90 %", "T_sync", "speed-up", "efficiency", "pays"]
    console.print(table("\nA step with the fastest of these, predicted", header, steps))
    for note in _assumptions(outlook):
        console.print(f"[dim]- {note}[/]")


def _assumptions(outlook: Outlook) -> Iterable[str]:
    counts = ", ".join(map(str, outlook.rank_counts))
    yield (
        f"fitted to {outlook.measured} measurements with {counts} ranks on one host; for more "
        "ranks this is a model and not a measurement; the interval covers only the fit's error"
    )
    if outlook.here > 0:
        yield (
            f"for the profiled ranks, the model predicts {time_name(outlook.here)} for a step's "
            f"calls, measured {time_name(outlook.moved_here)}"
            + "; the difference stays in every T_sync"
            * (outlook.excess > 0)
        )
    if outlook.far is None:
        yield (
            "all ranks are assumed to be connected as those of this host: give --link "
            "(10us,12GB/s) and --per-host for several hosts"
        )
    else:
        yield (
            f"{outlook.per_host} rank(s) a host, which share a connection of "
            f"{time_name(outlook.far.alpha)} and {rate_name(1 / outlook.far.beta)}, without "
            "contention between hosts"
        )
    yield (
        "assumptions: each rank computes a step as now (its mini-batch stays the same, so the "
        "whole batch grows), waits for late ranks as now, and hides the same share of its calls "
        "as long as there is time to compute; speed-up is over one rank"
    )
    if outlook.left_out:
        yield f"calls that the model does not include: {', '.join(outlook.left_out)}"
