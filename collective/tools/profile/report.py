"""Output of a profile: tables for a terminal, and JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from collective.tools.show import Console, rate_name, size_name, time_name

from .measure import OperationCost, Payoff, Profile, StepTimes, judge


def as_json(found: Profile) -> dict[str, Any]:
    """Return the profile and the verdict as plain data, in seconds and bytes."""
    plain: dict[str, Any] = dataclasses.asdict(found)
    for one, operation in zip(plain["operations"], found.operations):
        one |= {"algbw": operation.algbw, "busbw": operation.busbw}
        one["late"] = {str(rank): count for rank, count in operation.late.items()}
    plain["verdict"] = None
    if found.steps is not None:
        plain["verdict"] = dataclasses.asdict(judge(found.steps, found.ranks))
        if math.isinf(plain["verdict"]["ratio"]):
            plain["verdict"]["ratio"] = None
    return plain


def show(out: Console, found: Profile) -> None:
    """Print the profile and the verdict."""
    out.say(f"{found.ranks} rank(s) over {found.about['backend']}, {found.seconds:.2f} s traced")
    if found.operations:
        _show_operations(out, found.operations)
    for note in _notes(found):
        out.say(f"- {note}", indent=2)
    if found.steps is None:
        out.say(
            "\nNo training steps found: nothing marks them, and no loop of calls repeats "
            "often enough. Call collective.profile.step() once in each step."
        )
        return
    _show_steps(out, found.steps, judge(found.steps, found.ranks))


def _show_operations(out: Console, operations: Iterable[OperationCost]) -> None:
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
    out.table("Calls", [*header, "hidden", "late"], rows)


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


def _show_steps(out: Console, steps: StepTimes, verdict: Payoff) -> None:
    spread = ""
    if len(steps.comp_by_rank) > 1:
        spread = f" ({time_name(min(steps.comp_by_rank))} to {time_name(max(steps.comp_by_rank))})"
    out.say(f"\n{steps.count} steps, by {steps.how}; medians, means of the ranks:")
    rows = [
        f"T_comp     {time_name(steps.comp)} computing{spread}",
        f"T_sync     {time_name(steps.sync)} in calls, {time_name(steps.waiting)} of it waiting "
        "for late ranks",
    ]
    if steps.background > 0:
        rows.append(
            f"hidden     {time_name(steps.hidden)} of {time_name(steps.background)} of calls in "
            f"the background ({steps.hidden / steps.background:.0%})"
        )
    bound = verdict.ranks - 1
    if bound == 0:
        rows.append("criterion  one rank: there is no communication to weigh against computing")
    else:
        sign = "<" if verdict.pays else ">="
        rows += [
            f"criterion  T_sync / T_comp = {verdict.ratio:.3g} {sign} R - 1 = {bound}: "
            f"{verdict.ranks} ranks {'pay' if verdict.pays else 'do not pay'}; "
            f"{verdict.speedup:.2f} x one rank, {verdict.efficiency:.0%} of {verdict.ranks}",
            f"more       {2 * verdict.ranks} ranks are faster than {verdict.ranks} as long as "
            f"their T_sync stays below {time_name(verdict.doubled_limit)}",
        ]
    out.say("\n".join(rows), indent=11)
