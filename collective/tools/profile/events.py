"""Reader of traces: the slices of each rank, and one file for all ranks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collective import ConfigError
from collective.inner import trace

#: Categories of slices in which the program is in a call and does not compute.
IN_CALLS = frozenset({"collective", "enqueue", "compare", "message", "wait", "start"})


@dataclass(slots=True)
class Slice:
    """Slice of a trace: an activity of a rank.

    Attributes:
        name, category, args: as in the trace.
        tid: track of the slice.
        start, end: seconds on rank 0's clock; ``end`` is the end of the trace if the activity did
            not end.
        over: whether the activity ended.
    """

    name: str
    category: str
    tid: int
    start: float
    end: float
    args: dict[str, Any]
    over: bool = True

    @property
    def background(self) -> bool:
        """Whether the activity ran beside the program."""
        return self.tid >= trace.FIRST_LANE

    @property
    def key(self) -> tuple[str, int, str]:
        """Key of a call, the same on all its ranks."""
        return self.args.get("comm", ""), self.args.get("seq", 0), self.name


@dataclass
class RankTrace:
    """Trace of one rank.

    Attributes:
        about: head of the file: rank, size, local_size, host, backend, …
        slices: slices in the order in which they began.
        steps: source of the marks -> times of the marks.
    """

    about: dict[str, Any]
    slices: list[Slice] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank whose trace this is."""
        return int(self.about["rank"])

    def calls(self) -> list[Slice]:
        """Return the collective calls, without those that failed because the ranks differ."""
        return [
            call for call in self.slices
            if call.category in ("collective", "enqueue") and not call.args.get("differ")
        ]  # fmt: skip


def read(directory: Path) -> list[RankTrace]:
    """Return the traces of the last run that wrote to ``directory``, by rank.

    Raises:
        ConfigError: there is no trace.
    """
    return [_rank_trace(about, events) for about, events in _files(directory)]


def merge(directory: Path, output: Path | None = None) -> tuple[Path, int, int]:
    """Write the traces of the last run in ``directory`` as one file.

    Args:
        directory: directory of the ranks' traces.
        output: the file; None for ``all.json`` in the directory, which must not exist yet or
            belong to this user.

    Returns:
        The file, the number of ranks, and the number of events.

    Raises:
        ConfigError: there is no trace, or ``output`` cannot be written.
    """
    ranks, count = _files(directory), 0
    about = {**ranks[0][0], "rank": [head["rank"] for head, _ in ranks]}
    path = directory / "all.json" if output is None else output
    try:
        # With a default name in a directory that others can write to, the file may be another
        # user's.
        where: int | Path = path
        if output is None:
            where = trace.open_file(str(path))
            os.ftruncate(where, 0)
        with open(where, "w", encoding="utf-8") as file:
            head = json.dumps({"displayTimeUnit": "ns", "otherData": about})
            file.write(f'{head[:-1]}, "traceEvents": [')
            for _, events in ranks:
                for event in events:
                    file.write(f"{',' * (count > 0)}\n{json.dumps(event, separators=(',', ':'))}")
                    count += 1
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"trace: {path} cannot be written: {error.strerror}.") from error
    return path, len(ranks), count


def _files(directory: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return head and events of each rank's file of the last run."""
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    files = [path for path in directory.glob("rank-*.json") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        about, events = _content(path)
        if about and (not found or about["run"] == found[0][0]["run"]):
            found.append((about, events))
    if not found:
        raise ConfigError(
            f"trace: no trace in {directory}. Run the program with COLLECTIVE_TRACE={directory}, "
            "and let it come as far as init()."
        )
    return sorted(found, key=lambda one: int(one[0]["rank"]))


def _content(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return head and events of a file; {} if it has no whole head.

    The head and each event have a line. The file may be cut off in the middle of a write.
    """
    head, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    try:
        about: dict[str, Any] = json.loads(head.removesuffix("[") + "[]}")["otherData"]
    except (ValueError, KeyError):
        return {}, []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line, which closes the file or is cut off
            event = json.loads(line.removesuffix(","))
            if isinstance(event, dict):
                events.append(event)
    return about, events


def _rank_trace(about: dict[str, Any], events: Iterable[dict[str, Any]]) -> RankTrace:
    of_rank = RankTrace(about)
    open_: dict[int, list[Slice]] = {}
    last = 0.0
    for event in events:
        if "ts" not in event:
            continue
        tid, at, phase = event["tid"], event["ts"] / 1e6, event["ph"]
        last = max(last, at)
        stack = open_.setdefault(tid, [])
        if phase == "B":
            one = Slice(event["name"], event["cat"], tid, at, at, event["args"], over=False)
            of_rank.slices.append(one)
            stack.append(one)
        elif phase == "E" and stack:
            one = stack.pop()
            one.end, one.over = at, True
            one.args.update(event["args"])
        elif phase == "i" and event["cat"] == "step":
            of_rank.steps.setdefault(event["args"]["by"], []).append(at)
        elif phase == "i" and event["cat"] == "message" and stack:
            stack[-1].args["bytes"] = event["args"]["bytes"]
    for stack in open_.values():
        for one in stack:
            one.end = last
    of_rank.slices.sort(key=lambda one: one.start)
    return of_rank
